//! Tiles of scores.

use std::ops::Range;

use crate::{
    attention::{AttentionOptions, Dropped},
    reference::attention::AttentionInputs,
};

use super::product::{Matrix, product};

/// Queries of a tile.
pub(super) const ROWS: usize = 64;
/// Keys of a tile.
pub(super) const COLS: usize = 256;

/// Elements that loops take at once: several vectors.
const LANES: usize = 16;

/// The inputs that all tiles of one call read.
#[derive(Clone, Copy)]
pub(super) struct Problem<'a> {
    pub inputs: &'a AttentionInputs<'a, f32>,
    pub options: &'a AttentionOptions,
}

/// Some queries and some keys of a head.
#[derive(Clone)]
pub(super) struct Tile {
    pub batch: usize,
    pub head: usize,
    pub rows: Range<usize>,
    pub cols: Range<usize>,
}

/// Consecutive pieces of a range, cut at the multiples of `size`.
pub(super) fn pieces(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let whole = range.start / size..range.end.div_ceil(size);
    let pieces =
        whole.map(move |index| range.start.max(index * size)..range.end.min((index + 1) * size));
    pieces.filter(|piece| !piece.is_empty())
}

impl<'a> Problem<'a> {
    /// The number of a head of queries among those of all batches.
    pub(super) fn query_head(&self, tile: &Tile) -> usize {
        tile.batch * self.inputs.shape.heads + tile.head
    }

    /// That of the head of keys that it reads.
    pub(super) fn key_head(&self, tile: &Tile) -> usize {
        let shape = &self.inputs.shape;
        tile.batch * shape.kv_heads + tile.head / shape.group()
    }

    /// The tile's rows of a tensor of the queries' form, of this width.
    pub(super) fn of_queries(&self, data: &'a [f32], tile: &Tile, width: usize) -> Matrix<'a> {
        let first = self.query_head(tile) * self.inputs.shape.queries + tile.rows.start;
        matrix(data, first, tile.rows.len(), width)
    }

    /// The tile's rows of a tensor of the keys' form.
    fn of_keys(&self, data: &'a [f32], tile: &Tile, width: usize) -> Matrix<'a> {
        let first = self.key_head(tile) * self.inputs.shape.keys + tile.cols.start;
        matrix(data, first, tile.cols.len(), width)
    }

    pub(super) fn query(&self, tile: &Tile) -> Matrix<'a> {
        self.of_queries(self.inputs.query, tile, self.inputs.shape.width)
    }

    pub(super) fn key(&self, tile: &Tile) -> Matrix<'a> {
        self.of_keys(self.inputs.key, tile, self.inputs.shape.width)
    }

    pub(super) fn value(&self, tile: &Tile) -> Matrix<'a> {
        self.of_keys(self.inputs.value, tile, self.inputs.shape.value_width)
    }

    /// The keys that some of these queries see.
    pub(super) fn keys_of(&self, rows: &Range<usize>) -> Range<usize> {
        let (shape, band) = (&self.inputs.shape, self.options.band);
        let start = band.keys_of(rows.start, shape).start;
        start..band.keys_of(rows.end - 1, shape).end.max(start)
    }

    /// The queries that see some of these keys.
    pub(super) fn queries_of(&self, cols: &Range<usize>) -> Range<usize> {
        let (shape, band) = (&self.inputs.shape, self.options.band);
        let start = band.queries_of(cols.start, shape).start;
        start..band.queries_of(cols.end - 1, shape).end.max(start)
    }

    /// Scores of a tile, negative infinity where a key is hidden; and in `slopes`, if it has room, theirs.
    pub(super) fn scores(&self, tile: &Tile, scores: &mut [f32], slopes: &mut [f32]) {
        let factor = self.options.scale;
        product(scores, self.query(tile), self.key(tile).t(), factor, false);
        slopes.fill(1.0);
        if let Some(cap) = self.options.softcap {
            for (index, score) in scores.iter_mut().enumerate() {
                let tanh = (*score / cap).tanh();
                *score = cap * tanh;
                if let Some(slope) = slopes.get_mut(index) {
                    *slope = 1.0 - tanh * tanh;
                }
            }
        }
        for values in [&mut *scores, slopes] {
            let rows = values.chunks_exact_mut(tile.cols.len());
            for (row, values) in tile.rows.clone().zip(rows) {
                self.drop(Dropped::Scores, tile, row, values);
            }
        }
        let rows = scores.chunks_exact_mut(tile.cols.len());
        for (row, scores) in tile.rows.clone().zip(rows) {
            self.add_bias(tile, row, scores);
            self.hide(tile, row, scores);
        }
    }

    fn add_bias(&self, tile: &Tile, row: usize, scores: &mut [f32]) {
        let Some(bias) = &self.inputs.bias else {
            return;
        };
        let start = bias.index(tile.batch, tile.head, row, tile.cols.start);
        match bias.shape[3] {
            1 => scores
                .iter_mut()
                .for_each(|score| *score += bias.data[start]),
            _ => {
                let of_row = &bias.data[start..][..scores.len()];
                scores
                    .iter_mut()
                    .zip(of_row)
                    .for_each(|(score, bias)| *score += bias);
            }
        }
    }

    fn hide(&self, tile: &Tile, row: usize, scores: &mut [f32]) {
        let visible = self.options.band.keys_of(row, &self.inputs.shape);
        let inside = |key: usize| key.clamp(tile.cols.start, tile.cols.end) - tile.cols.start;
        scores[..inside(visible.start)].fill(f32::NEG_INFINITY);
        scores[inside(visible.end)..].fill(f32::NEG_INFINITY);
        let Some(mask) = &self.inputs.mask else {
            return;
        };
        let start = mask.index(tile.batch, tile.head, row, tile.cols.start);
        match mask.shape[3] {
            1 if mask.data[start] => scores.fill(f32::NEG_INFINITY),
            1 => {}
            _ => {
                for (score, hidden) in scores.iter_mut().zip(&mask.data[start..]) {
                    *score = if *hidden { f32::NEG_INFINITY } else { *score };
                }
            }
        }
    }

    /// Multiplies a row of the tile by its factors, where it is such numbers that dropout drops.
    pub(super) fn drop(&self, dropped: Dropped, tile: &Tile, row: usize, values: &mut [f32]) {
        if let Some(dropout) = self.options.dropout_of(dropped) {
            let row = self.query_head(tile) * self.inputs.shape.queries + row;
            dropout.draw.apply(row, tile.cols.start, values);
        }
    }
}

fn matrix(data: &[f32], first: usize, rows: usize, width: usize) -> Matrix<'_> {
    Matrix::rows(&data[first * width..][..rows * width], [rows, width])
}

/// The largest of a row, NaN passed over.
pub(super) fn largest(row: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    reduce(row, f32::NEG_INFINITY, larger)
}

/// The sum of a row, in the order of [`LANES`] partial sums.
pub(super) fn sum(row: &[f32]) -> f32 {
    reduce(row, 0.0, |a, b| a + b)
}

#[inline(always)]
fn reduce(row: &[f32], start: f32, combine: impl Fn(f32, f32) -> f32) -> f32 {
    let (vectors, rest) = row.as_chunks::<LANES>();
    let mut lanes = [start; LANES];
    for vector in vectors {
        for (lane, &x) in lanes.iter_mut().zip(vector) {
            *lane = combine(*lane, x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane = combine(*lane, x);
    }
    lanes.into_iter().fold(start, combine)
}
