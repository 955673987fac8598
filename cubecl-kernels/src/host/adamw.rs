//! AdamW on all cores.

use rayon::prelude::*;

use crate::{
    optimizer_state::MAX_GROUP,
    reference::{
        self,
        adamw::{MomentChunk, StateDither, Step},
    },
};

/// About as many elements as a thread takes at a time.
const CHUNK: usize = 4 * MAX_GROUP;

/// One AdamW step of a parameter, in place: [`reference::adamw::adamw`] on all cores. Groups are multiples of 4 where
/// there is a `dither`.
///
/// # Panics
///
/// When the tensors differ in length, a group is 0 or larger than [`MAX_GROUP`], or the smaller group does not divide
/// the larger.
pub fn adamw(
    step: &Step,
    parameter: &mut [f32],
    gradient: &[f32],
    first: MomentChunk<'_>,
    second: MomentChunk<'_>,
    dither: Option<StateDither>,
) {
    let lengths = [gradient.len(), first.len(), second.len()];
    assert_eq!(
        lengths,
        [parameter.len(); 3],
        "adamw: elements of the gradient and of both moments, beside the parameter's"
    );
    let groups = [first.group(), second.group()].into_iter().flatten();
    for group in groups.clone() {
        assert!(
            (1..=MAX_GROUP).contains(&group),
            "adamw: a group of {group} elements; use 1 to {MAX_GROUP}"
        );
    }
    let larger = groups.max().unwrap_or(1);
    let chunk = CHUNK / larger * larger;
    (
        parameter.par_chunks_mut(chunk),
        gradient.par_chunks(chunk),
        first.split(chunk),
        second.split(chunk),
    )
        .into_par_iter()
        .enumerate()
        .for_each(|(index, (parameter, gradient, first, second))| {
            let dither = dither.map(|dither| dither.behind(index * chunk));
            reference::adamw::adamw(step, parameter, gradient, first, second, dither);
        });
}
