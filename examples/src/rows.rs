//! JSON as result files have it: a row a line, so that a row that is added is a line of a diff.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::Formatter;

/// JSON with each element of an array on a line of its own, or each field of an object, and each element or field of
/// those again.
///
/// # Errors
///
/// `value` cannot be JSON.
pub fn to_string(value: &impl Serialize) -> serde_json::Result<String> {
    let mut text = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut text, Rows::default()))?;
    text.push(b'\n');
    String::from_utf8(text).map_err(serde::ser::Error::custom)
}

/// Breaks lines in an array at the top, or in an object at the top and one level below.
#[derive(Default)]
struct Rows {
    depth: usize,
    /// Levels that have lines.
    levels: usize,
    /// True if the innermost array or object has an element.
    filled: bool,
}

impl Rows {
    fn open<W: ?Sized + Write>(
        &mut self,
        out: &mut W,
        bracket: &[u8],
        levels: usize,
    ) -> io::Result<()> {
        if self.depth == 0 {
            self.levels = levels;
        }
        self.depth += 1;
        self.filled = false;
        out.write_all(bracket)
    }

    fn close<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.filled && self.depth < self.levels {
            self.new_line(out)?;
        }
        self.filled = true;
        out.write_all(bracket)
    }

    fn next<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if !first {
            out.write_all(b",")?;
        }
        match (self.depth <= self.levels, first) {
            (true, _) => self.new_line(out),
            (false, true) => Ok(()),
            (false, false) => out.write_all(b" "),
        }
    }

    fn new_line<W: ?Sized + Write>(&self, out: &mut W) -> io::Result<()> {
        out.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| out.write_all(b"  "))
    }
}

impl Formatter for Rows {
    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"[", 1)
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _out: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"{", 2)
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _out: &mut W) -> io::Result<()> {
        self.filled = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn elements_of_an_array_are_lines() {
        let runs = json!([{"a": [1, 2.5], "b": {}}, {"a": [], "b": null}, []]);
        assert_eq!(
            to_string(&runs).unwrap(),
            "[\n  {\"a\": [1, 2.5], \"b\": {}},\n  {\"a\": [], \"b\": null},\n  []\n]\n"
        );
        assert_eq!(to_string(&json!([])).unwrap(), "[]\n");
    }

    #[test]
    fn rows_in_an_object_are_lines() {
        let results = json!({"bench": "gemm", "rows": [{"m": [1, 2]}, {"m": []}], "run": {"seed": 1}, "peer": []});
        let text = to_string(&results).unwrap();
        assert_eq!(
            text,
            "{\n  \"bench\": \"gemm\",\n  \"rows\": [\n    {\"m\": [1, 2]},\n    {\"m\": []}\n  ],\n  \"run\": {\n    \
             \"seed\": 1\n  },\n  \"peer\": []\n}\n"
        );
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), results);
    }
}
