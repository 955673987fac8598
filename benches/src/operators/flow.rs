//! The numbers in which a recipe's values come to an operator and leave it, from its row.

use anyhow::{Context, Result, bail};
use burn_quant_train::recipe::{Cast, Granularity, Name, Product, Rounding};
use cubecl_kernels::{
    granularity,
    layout::Layout,
    quantize::QuantizeSpec,
    rounding::{self, StochasticKey},
};

/// How the matrices around an operator are quantized.
#[derive(Debug)]
pub struct Numbers {
    /// Its input, as that waits.
    pub input: QuantizeSpec,
    /// X of the linear layer behind it: for the product, and for the gradient of the weight.
    pub output: QuantizeSpec,
    /// The gradient of its output, as that layer gives it back; none where that is in BF16.
    pub output_gradient: Option<QuantizeSpec>,
    /// dY of the linear layers in front of it: for both products of their backward passes.
    pub input_gradients: [QuantizeSpec; 2],
}

impl Numbers {
    /// Those of this recipe.
    ///
    /// # Errors
    ///
    /// Nothing flows in numbers in this recipe.
    pub fn of(name: Name, seed: u64) -> Result<Self> {
        let row = name.row();
        let (Some(flow), Some(linear)) = (row.flow, row.linear) else {
            bail!("{name} has floats between its linear layers");
        };
        let left = |product| match product {
            Product::Quantized { left, .. } => Some(left),
            Product::Compute => None,
        };
        let operand = |product| left(product).context("a flow leads to quantized products");
        let (x, dy) = (operand(linear.forward)?, operand(linear.input_gradient)?);
        // Each matrix has random numbers of its own.
        let of_gradient = |stream| spec(&dy, Layout::Both, StochasticKey { seed, stream });
        let flowing =
            |cast: &Cast, stream| spec(cast, Layout::RowMajor, StochasticKey { seed, stream });
        let output_gradient = flow.gradients.as_ref().map(|cast| flowing(cast, 4));
        Ok(Self {
            input: flowing(&flow.activations, 1)?,
            output: spec(&x, Layout::Both, StochasticKey { seed, stream: 2 })?,
            output_gradient: output_gradient.transpose()?,
            input_gradients: [of_gradient(5)?, of_gradient(6)?],
        })
    }
}

fn spec(cast: &Cast, layout: Layout, key: StochasticKey) -> Result<QuantizeSpec> {
    let granularity = match cast.granularity {
        Granularity::Block(side) => granularity::Granularity::Block(side),
        Granularity::Group(size) => granularity::Granularity::Group(size),
        Granularity::Tensor => granularity::Granularity::Tensor,
        Granularity::Row => bail!("the scale of a row is that of one copy, not of both"),
    };
    Ok(QuantizeSpec {
        number: cast.number,
        scale: cast.scale,
        granularity,
        rounding: match cast.rounding {
            Rounding::Nearest => rounding::Rounding::Nearest,
            Rounding::Stochastic => rounding::Rounding::Stochastic(key),
        },
        layout,
    })
}

#[cfg(test)]
mod tests {
    use burn_quant_train::recipe::Number;
    use cubecl_kernels::granularity::Granularity;

    use super::*;

    fn numbers(name: &str) -> Result<Numbers> {
        Numbers::of(name.parse()?, 1)
    }

    #[test]
    fn coat_has_groups_between_layers_and_one_scale_in_them() {
        let numbers = numbers("coat-fp8").unwrap();
        let input = QuantizeSpec::new(Number::E4M3, Granularity::Group(16));
        assert_eq!(numbers.input, input);
        let output = QuantizeSpec::new(Number::E4M3, Granularity::Tensor);
        assert_eq!(numbers.output, output.with_layout(Layout::Both));
        assert!(numbers.output_gradient.is_none());
        assert_eq!(numbers.input_gradients[0].number, Number::E5M2);
    }

    #[test]
    fn jetfire_has_blocks_everywhere() {
        let numbers = numbers("jetfire-int8-128").unwrap();
        let block = QuantizeSpec::int8(Granularity::Block(128));
        assert_eq!(numbers.input, block);
        assert_eq!(numbers.output, block.with_layout(Layout::Both));
        let [of_gate, of_up] = numbers.input_gradients;
        let of_output = numbers.output_gradient.unwrap();
        assert!(of_gate.rounding != of_up.rounding && of_gate.rounding != of_output.rounding);
        assert_eq!(of_gate.with_rounding(block.rounding), numbers.output);
    }

    #[test]
    fn other_recipes_have_no_flow() {
        assert!(numbers("fallback-int8").is_err());
    }
}
