//! The names of state formats.

use cubecl_kernels::optimizer_state::{Encoding, StateFormat};

/// The name in tables, without the group: `E4M3 + expand`.
pub fn name(format: StateFormat) -> String {
    let encoding = match format.encoding {
        Encoding::E4M3 => "E4M3",
        Encoding::E5M2 => "E5M2",
        Encoding::DynamicExponent => "DE8",
        Encoding::Int8 => "INT8",
    };
    let expand = if format.expand { " + expand" } else { "" };
    format!("{encoding}{expand}")
}
