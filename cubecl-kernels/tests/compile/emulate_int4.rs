//! Products of INT4 on a CPU, against sums of integers.

use cubecl::ir::StorageType;
use cubecl_kernels::{
    KernelError,
    gemm::{Int4Operand, gemm_int4, has_gemm_int4},
};
use half::{bf16, f16};

use super::{
    device::to_bytes,
    dtype,
    emulate::UNWRITTEN,
    emulator::{Sanitizer, run},
    int4_sources,
    offline::sources_of,
    random::Random,
    tensor,
};

#[test]
fn equals_the_reference() {
    let mut random = Random::fresh();
    // More rows than a tile has, fewer columns; sums that end inside a stage, of fewer stages than the ring has and of
    // more.
    let cases = [
        ([2, 137, 50, 96], dtype::<f32>(), Sanitizer::Threads),
        ([1, 60, 133, 416], dtype::<bf16>(), Sanitizer::Addresses),
        ([3, 9, 1, 32], dtype::<f16>(), Sanitizer::Addresses),
    ];
    for (sizes, out, sanitizer) in random.few(cases, 1) {
        println!("{sizes:?}, {out}");
        emulate(&mut random, sizes, out, sanitizer);
    }
}

fn emulate(random: &mut Random, sizes: [usize; 4], out: StorageType, sanitizer: Sanitizer) {
    let [batch, m, n, k] = sizes;
    // All sixteen codes, though quantizers leave -8 out.
    let mut codes = |rows: usize| -> Vec<i32> {
        (0..batch * rows * k)
            .map(|_| random.index(16) as i32 - 8)
            .collect()
    };
    let (a, b) = (codes(m), codes(n));
    let (scales, has_bias) = ([0.37f32, 1.9], random.index(2) == 1);
    let bias: Vec<f32> = (0..n).map(|_| random.normal()).collect();
    let mut expected = Vec::new();
    for (row, of_a) in a.chunks(k).enumerate() {
        let of_matrix = row / m * n..(row / m + 1) * n;
        for (col, of_b) in of_matrix.map(|row| &b[row * k..][..k]).enumerate() {
            let sum: i32 = of_a.iter().zip(of_b).map(|(a, b)| a * b).sum();
            let product = sum as f32 * (scales[0] * scales[1]);
            expected.push(if has_bias {
                product + bias[col]
            } else {
                product
            });
        }
    }
    let packed = |codes: &[i32]| {
        let (pairs, _) = codes.as_chunks::<2>();
        let byte = |[low, high]: &[i32; 2]| (low & 15 | high << 4) as u8;
        pairs.iter().map(byte).collect::<Vec<u8>>()
    };
    let buffers = [
        scales[0].to_le_bytes().to_vec(),
        scales[1].to_le_bytes().to_vec(),
        bytemuck::cast_slice(&bias).to_vec(),
        vec![UNWRITTEN; batch * m * n * out.size()],
        packed(&a),
        packed(&b),
    ];
    let knobs = [
        format!("#define BIAS {}\n", u8::from(has_bias)),
        match out {
            out if out == dtype::<f32>() => "#define OUT_F32\n".into(),
            out if out == dtype::<f16>() => "#define OUT_F16\n".into(),
            _ => "#define OUT_BF16\n".into(),
        },
    ];
    let mut sources = int4_sources(80, sizes).into_iter();
    let source = sources.find(|source| knobs.iter().all(|knob| source.code.contains(knob)));
    let source = source.expect("the kernel of the case");
    let written = run(&source, &buffers, &format!("emulate-int4-{out}"), sanitizer);
    assert_eq!(
        written[3],
        to_bytes(&expected, out),
        "{sizes:?} {out}, bias: {has_bias}"
    );
}

/// Ampere and Ada alone have the instruction, and what it cannot read is refused.
#[test]
fn devices_and_operands() {
    for (architecture, has) in [
        (80, true),
        (86, true),
        (89, true),
        (90, false),
        (120, false),
    ] {
        sources_of(architecture, |client| {
            assert_eq!(has_gemm_int4(client), has, "sm_{architecture}");
        });
    }
    sources_of(80, |client| {
        let operand = |shape: &[usize], scales: &[usize]| Int4Operand {
            values: tensor(client, shape, dtype::<u8>()),
            scale: tensor(client, scales, dtype::<f32>()),
        };
        let product = |a: &Int4Operand<_>, b: &Int4Operand<_>| {
            gemm_int4(client, a, b, None, dtype::<f32>()).map(|_| ())
        };
        let good = operand(&[5, 48], &[1, 1]);
        assert!(product(&good, &operand(&[7, 48], &[1])).is_ok());
        let is_shape = |it| matches!(it, Err(KernelError::Shape { .. }));
        assert!(is_shape(product(&good, &operand(&[7, 64], &[1]))));
        assert!(is_shape(product(&good, &operand(&[2, 7, 48], &[1]))));
        assert!(is_shape(product(&good, &operand(&[7, 48], &[7, 1]))));
        let odd = operand(&[5, 40], &[1]);
        let refused = product(&odd, &odd);
        assert!(matches!(refused, Err(KernelError::Unsupported { .. })));
    });
}
