//! Which elements of a flattened tensor a unit holds.

use cubecl::{ir::features::Plane, prelude::*};

use crate::error::KernelError;

use super::{StateFormat, table};

/// Units of a cube.
pub(crate) const UNITS: usize = 256;
/// Tiles of a cube that fills tables first, at most. On one NVIDIA H200, 2026-11-22, AdamW on 2^28 parameters took 4%
/// longer with 16 of them, for COAT's pair of formats, and 13% longer with no more cubes than run at a time.
const TILES: u32 = 8;
/// Tiles of a cube without tables where values are compressed, at most: with one AdamW took 4% to 9% longer, measured
/// as above.
const TILES_WITHOUT_TABLES: u32 = 4;
/// Cubes that keep a large device busy: fewer would leave units idle while each took many tiles.
const BUSY: usize = 512;
/// Quads that a unit holds at most, where it can: enough loads in flight to hide the latency of memory, and few enough
/// to stay in registers beside the arithmetic of both moments.
const QUADS: usize = 2;
/// Elements of a tensor for which a second launch pays, of tiles that need no guards.
const LARGE: usize = 1 << 20;

/// How a cube shares a stretch of a flattened tensor.
///
/// Units take groups in runs of `lanes`, a power of two. The lanes of a run take quads (four neighbours) in turn, so
/// neighbouring lanes read neighbouring addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Span {
    /// Elements of a run: the smaller group of the states that share the span.
    pub run: usize,
    /// Units of a run.
    pub lanes: usize,
    /// Quads that a unit holds.
    pub quads: usize,
    /// Stretches of the tensor that a cube takes one after the other, so that what it prepares serves all of them. Of a
    /// small tensor it takes fewer.
    pub tiles: u32,
    /// Units of a plane, where lanes exchange values without shared memory.
    pub plane: Option<usize>,
    /// True where all tiles of a launch lie in the tensor as a whole, so that no access needs a guard.
    pub whole: bool,
    /// Elements that a kernel reads and writes at once: 4, or 1.
    pub width: usize,
}

impl Span {
    /// The span for states of these formats on this device.
    pub fn new<R: Runtime>(
        client: &ComputeClient<R>,
        operation: &'static str,
        formats: &[Option<StateFormat>],
    ) -> Result<Self, KernelError> {
        let groups = || formats.iter().flatten().map(|format| format.group);
        let (smallest, largest) = match (groups().min(), groups().max()) {
            (Some(smallest), Some(largest)) => (smallest, largest),
            _ => (UNITS * QUADS * 4, UNITS * QUADS * 4),
        };
        let lanes = (smallest / 4).div_ceil(QUADS).next_power_of_two();
        let ratio = largest / smallest;
        if largest % smallest != 0 || !ratio.is_power_of_two() || lanes * ratio > UNITS {
            return Err(KernelError::Unsupported {
                operation,
                reason: format!("moments in groups of {smallest} and {largest} together"),
                remedy: "use groups of one size, or of sizes a power of two up to 128 apart",
            });
        }
        let hardware = &client.properties().hardware;
        let plane = (client.features().plane.contains(Plane::Ops)
            && hardware.plane_size_min == hardware.plane_size_max
            && hardware.plane_size_max.is_power_of_two()
            && UNITS % hardware.plane_size_max as usize == 0)
            .then_some(hardware.plane_size_max as usize);
        Ok(Self {
            run: smallest,
            lanes,
            quads: (smallest / 4).div_ceil(lanes),
            tiles: if formats.iter().any(|&format| table::is_needed(format)) {
                TILES
            } else if formats.iter().any(Option::is_some) {
                TILES_WITHOUT_TABLES
            } else {
                1
            },
            plane,
            whole: false,
            width: 1,
        })
    }

    /// The dimensions of a cube.
    pub fn cube_dim(&self) -> CubeDim {
        CubeDim::new_1d(UNITS as u32)
    }

    /// Units of a cube.
    pub const fn units(&self) -> usize {
        UNITS
    }

    /// Elements that a cube holds at a time: a tile.
    pub const fn elements(&self) -> usize {
        UNITS / self.lanes * self.run
    }

    /// Values that a unit holds.
    pub const fn held(&self) -> usize {
        self.quads * 4
    }

    /// Units that share a group of this size.
    pub const fn segment(&self, group: usize) -> usize {
        self.lanes * (group / self.run)
    }

    /// The launches of a kernel over `len` elements: tiles that lie in the tensor as a whole, four elements at once,
    /// and what is left. One launch alone where nothing is left, where tensors do not allow reads of four, and where
    /// all elements can be read so but are too few for the guards to matter.
    pub fn launches(&self, len: usize, aligned: bool) -> Vec<Stretch> {
        let tiles = len.div_ceil(self.elements());
        let quads = len % 4 == 0;
        let width = if aligned && quads { 4 } else { 1 };
        let small = quads && len % self.elements() != 0 && len < LARGE;
        let whole = if aligned && !small {
            len / self.elements()
        } else {
            0
        };
        [(0, whole, true, 4), (whole, tiles, false, width)]
            .into_iter()
            .filter(|(first, end, ..)| first < end)
            .map(|(first, end, whole, width)| Stretch {
                first,
                end,
                cubes: (end - first)
                    .div_ceil(self.tiles as usize)
                    .max(BUSY.min(end - first)),
                span: Self {
                    whole,
                    width,
                    ..*self
                },
            })
            .collect()
    }
}

/// Consecutive tiles of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stretch {
    /// Index of the first.
    pub first: usize,
    /// Index behind the last.
    pub end: usize,
    /// Cubes that take them.
    pub cubes: usize,
    /// How a cube shares a tile.
    pub span: Span,
}

/// The first of a cube's tiles. The others follow at a distance of [`tile_stride`].
#[cube]
pub(crate) fn first_tile(first: u32) -> u32 {
    CUBE_POS as u32 + first
}

/// Cubes take tiles in turn, so that those that run at one time read and write one stretch of each tensor.
#[cube]
pub(crate) fn tile_stride() -> u32 {
    CUBE_COUNT as u32
}

/// The first element of a unit's `index`-th quad, or `len` where it has none.
#[cube]
pub(crate) fn quad_start(start: u32, len: u32, index: u32, #[comptime] span: Span) -> u32 {
    let lanes = comptime!(span.lanes as u32);
    let quad = UNIT_POS % lanes + index * lanes;
    let mut element = start + UNIT_POS / lanes * comptime!(span.run as u32) + quad * 4;
    if comptime!(!span.whole) {
        element = min(element, len);
    }
    if comptime!(span.lanes * span.quads * 4 != span.run) {
        element = select(quad < comptime!(span.run as u32 / 4), element, len);
    }
    element
}

/// True where an element that [`quad_start`] gave, or one behind it, exists: known to the compiler where all do.
#[cube]
pub(crate) fn exists(element: u32, len: u32, #[comptime] span: Span) -> bool {
    if comptime!(span.whole && span.lanes * span.quads * 4 == span.run) {
        true.runtime()
    } else {
        element < len
    }
}

/// Reads the elements of a unit; `fill` where it has none.
#[cube]
pub(crate) fn read_held<E: Numeric, T: Numeric, N: Size>(
    x: &Array<Vector<E, N>>,
    start: u32,
    len: u32,
    #[comptime] span: Span,
    #[comptime] fill: u8,
) -> Array<T> {
    let mut held = Array::<T>::new(comptime!(span.held()));
    #[unroll]
    for index in 0..comptime!(span.quads as u32) {
        let element = quad_start(start, len, index, span);
        let slot = comptime!((index * 4) as usize);
        #[unroll]
        for piece in 0..comptime!(4 / span.width) {
            #[unroll]
            for lane in 0..comptime!(span.width) {
                held[comptime!(slot + piece * span.width + lane)] =
                    T::from_int(comptime!(fill as i64));
            }
            let at = element + comptime!((piece * span.width) as u32);
            if exists(at, len, span) {
                let vector = x[(at / comptime!(span.width as u32)) as usize];
                #[unroll]
                for lane in 0..comptime!(span.width) {
                    held[comptime!(slot + piece * span.width + lane)] = T::cast_from(vector[lane]);
                }
            }
        }
    }
    held
}

/// Writes the elements of a unit.
#[cube]
pub(crate) fn write_held<T: Numeric, E: Numeric, N: Size>(
    out: &mut Array<Vector<E, N>>,
    held: &Array<T>,
    start: u32,
    len: u32,
    #[comptime] span: Span,
) {
    #[unroll]
    for index in 0..comptime!(span.quads as u32) {
        let element = quad_start(start, len, index, span);
        let slot = comptime!((index * 4) as usize);
        #[unroll]
        for piece in 0..comptime!(4 / span.width) {
            let at = element + comptime!((piece * span.width) as u32);
            if exists(at, len, span) {
                let mut vector = Vector::<E, N>::empty();
                #[unroll]
                for lane in 0..comptime!(span.width) {
                    vector[lane] = E::cast_from(held[comptime!(slot + piece * span.width + lane)]);
                }
                out[(at / comptime!(span.width as u32)) as usize] = vector;
            }
        }
    }
}

/// The largest value among each `segment` consecutive units, a power of two, in all of them.
#[cube]
pub(crate) fn segment_max(value: u32, #[comptime] span: Span, #[comptime] segment: usize) -> u32 {
    if comptime!(span.plane.is_none()) {
        let mut reduced = value;
        if comptime!(segment > 1) {
            reduced = crate::quantize::tile::segment_max(value, span.units(), segment);
        }
        reduced
    } else {
        strided_max(value, 1usize, comptime!(span.plane.unwrap_or(1)), segment)
    }
}

/// The largest of two values among each `segment` consecutive units, a power of two from 2 on: of `even` in the even
/// units, of `odd` in the odd ones. For units of planes.
#[cube]
pub(crate) fn segment_max_in_turn(
    even: u32,
    odd: u32,
    #[comptime] span: Span,
    #[comptime] segment: usize,
) -> u32 {
    let is_odd = UNIT_POS % 2 == 1;
    let neighbours = plane_shuffle_xor(select(is_odd, even, odd), 1);
    let value = max(select(is_odd, odd, even), neighbours);
    strided_max(value, 2usize, comptime!(span.plane.unwrap_or(1)), segment)
}

/// The largest value among those of each `segment` consecutive units that lie a multiple of `stride` apart.
#[cube]
fn strided_max(
    value: u32,
    #[comptime] stride: usize,
    #[comptime] plane: usize,
    #[comptime] segment: usize,
) -> u32 {
    let mut reduced = value;
    #[unroll]
    for step in comptime!(stride.ilog2())..comptime!(segment.min(plane).ilog2()) {
        reduced = max(reduced, plane_shuffle_xor(reduced, comptime!(1u32 << step)));
    }
    if comptime!(segment > plane) {
        let mut shared = SharedMemory::<u32>::new(comptime!(UNITS / plane * stride));
        let index = UNIT_POS as usize / plane;
        let lane = UNIT_POS as usize % plane;
        sync_cube();
        if lane < stride {
            shared[index * stride + lane] = reduced;
        }
        sync_cube();
        let planes = comptime!(segment / plane);
        let first = index / planes * planes;
        #[unroll]
        for other in 0..planes {
            reduced = max(reduced, shared[(first + other) * stride + lane % stride]);
        }
    }
    reduced
}
