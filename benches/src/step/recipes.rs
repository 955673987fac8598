//! Which recipes are measured.

use burn_quant_train::recipe::Name;
use clap::Args;
use examples::args::recipe_parser;

/// The recipes that are measured beside Burn.
#[derive(Args, Debug, Clone)]
#[group(skip)]
pub struct Recipes {
    /// Recipes that layers and training steps are measured in, beside Burn in BF16
    #[arg(
        long = "recipe",
        value_delimiter = ',',
        default_values = ["mixed-precision", "fallback-int8"],
        value_parser = recipe_parser(),
        value_name = "NAME,..",
        global = true
    )]
    pub names: Vec<Name>,
    /// Leave out plain Burn, whose attention keeps all scores, and whose products take minutes to tune. Decoder layers
    /// wider than 1024 are then compared with `mixed-precision`, and what training steps take from the device is told of the
    /// first recipe, since its pools keep it
    #[arg(long, global = true)]
    pub without_burn: bool,
}
