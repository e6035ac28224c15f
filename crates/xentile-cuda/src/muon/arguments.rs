//! What the kernels of Muon's symmetric products take.

use crate::driver::TensorMap;

mirror! {
    /// See kernels/muon.cuh.
    pub(crate) struct Arguments = MuonArguments {
        x: TensorMap,
        out: TensorMap,
        partial: *mut f32,
        side: u32,
        blocks: u32,
        splits: u32,
        pairs: u32,
        items: u32,
        all: u32,
        c0: f32,
        c1: f32,
        c2: f32,
    }
}

numbers! {
    THREADS: u32 = kMuonThreads, 384;
    SUM_THREADS: u32 = kMuonSumThreads, 256;
    TILE_ROWS: usize = kMuonTileRows, 128;
    TILE_COLUMNS: usize = kMuonTileColumns, 256;
    BOX: u32 = kMuonBox, 64;
    SUM_BYTES: u32 = kMuonSumBytes, 33_792;
    BYTES: u32 = kMuonBytes, 230_400;
}
