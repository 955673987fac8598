//! The moments of one parameter, in any format.

use burn_backend::{
    Shape,
    tensor::{Device, FloatTensor},
};

use crate::data::{
    DataBackend,
    optimizer::{
        Moment, MomentState, StateFormat, compress_moment, decompress_moment, initial_moment,
    },
};

/// The moments of one parameter.
#[derive(Debug, Clone)]
pub(super) struct Moments<B: DataBackend> {
    pub(super) first: MomentState<B>,
    pub(super) second: MomentState<B>,
}

impl<B: DataBackend> Moments<B> {
    /// Those of a parameter before its first step.
    pub(super) fn initial(parameter: &FloatTensor<B>, formats: [Option<StateFormat>; 2]) -> Self {
        let [first, second] = formats;
        let initial = |format, moment| initial_moment::<B>(parameter.clone(), format, moment);
        Self {
            first: initial(first, Moment::First),
            second: initial(second, Moment::Second),
        }
    }

    /// Panics unless the moments are those of a parameter of this shape.
    pub(super) fn check_shape(&self, name: &str, shape: &Shape) {
        let found = self.first.shape();
        assert!(
            found == *shape,
            "adamw: {name} has shape {shape:?}, but its optimizer state {found:?}; was the record loaded for another \
             model?"
        );
    }

    pub(super) fn moved_to(self, device: &Device<B>) -> Self {
        Self {
            first: self.first.moved_to(device),
            second: self.second.moved_to(device),
        }
    }

    /// In these formats: moments of a record may be in others.
    pub(super) fn converted(self, formats: [Option<StateFormat>; 2]) -> Self {
        let [first, second] = formats;
        Self {
            first: convert(self.first, first, Moment::First),
            second: convert(self.second, second, Moment::Second),
        }
    }
}

fn convert<B: DataBackend>(
    state: MomentState<B>,
    format: Option<StateFormat>,
    moment: Moment,
) -> MomentState<B> {
    if state.format() == format {
        return state;
    }
    let values = decompress_moment::<B>(state, moment);
    match format {
        None => MomentState::Full(values),
        Some(format) => compress_moment::<B>(values, format, moment),
    }
}
