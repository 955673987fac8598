//! The generator against the known answers that Random123 ships (kat_vectors, philox4x32 with 10 rounds).

use cubecl_kernels::{
    philox::{dither, dither_row, philox4x32},
    rounding::StochasticKey,
};

#[test]
fn known_answers() {
    assert_eq!(
        philox4x32([0; 4], [0; 2]),
        [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
    );
    assert_eq!(
        philox4x32([u32::MAX; 4], [u32::MAX; 2]),
        [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
    );
    assert_eq!(
        philox4x32(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0]
        ),
        [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
    );
}

/// Each of the eight neighbours that share a counter has 15 bits of its own.
#[test]
fn dithers_of_a_row() {
    let key = StochasticKey {
        seed: 0x0123_4567_89ab_cdef,
        stream: 0xfedc_ba98_7654_3210,
    };
    let mut row = [0.0; 1003];
    dither_row(key, 7, &mut row);
    for (col, &u) in row.iter().enumerate() {
        assert_eq!(u, dither(key, 7, col));
        let counter = [7, col as u32 / 8, 0x7654_3210, 0xfedc_ba98];
        let word = philox4x32(counter, [0x89ab_cdef, 0x0123_4567])[col % 8 / 2];
        let bits = if col % 2 == 0 {
            word % (1 << 15)
        } else {
            word >> 17
        };
        assert_eq!(u * 32_768.0, bits as f32);
    }
}
