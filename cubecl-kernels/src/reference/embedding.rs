//! The gradient of an embedding's table, to the bit.

/// The gradient `[rows, cols]` of a table, from that of the rows `[tokens, cols]` that `indices` took of it: the sums
/// over the tokens of each row, in ascending order, in `f32`. Indices that are no row are left out.
pub fn embedding_gradient(indices: &[i64], gradient: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    let mut table = vec![0.0; rows * cols];
    for (token, &index) in indices.iter().enumerate() {
        let Some(row) = usize::try_from(index).ok().filter(|&row| row < rows) else {
            continue;
        };
        for col in 0..cols {
            table[row * cols + col] += gradient[token * cols + col];
        }
    }
    table
}
