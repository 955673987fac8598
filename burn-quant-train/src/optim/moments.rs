//! The moments of one parameter, in any format.

use burn_backend::{Shape, tensor::Device};

use crate::data::{
    DataBackend,
    optimizer::{Moment, MomentState, StateFormat, compress_moment, decompress_moment},
};

/// The moments of one parameter.
#[derive(Debug, Clone)]
pub(super) struct Moments<B: DataBackend> {
    pub(super) first: MomentState<B>,
    pub(super) second: MomentState<B>,
}

impl<B: DataBackend> Moments<B> {
    pub(super) fn zeros(
        shape: &Shape,
        formats: [Option<StateFormat>; 2],
        device: &Device<B>,
    ) -> Self {
        let [first, second] = formats;
        Self {
            first: MomentState::zeros(shape.clone(), first, Moment::First, device),
            second: MomentState::zeros(shape.clone(), second, Moment::Second, device),
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
