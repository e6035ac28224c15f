//! Attention by tiles of keys, whose logits are never all in memory.
//!
//! The rows of a head of keys are the queries of its whole group, one head after the other. They are
//! taken a *block* at a time, and keys a *tile* at a time: logits of a block and a tile are a product in
//! f32, which a pass over rows turns into probabilities where they lie, operands of the next product.
//! Blocks and tiles have fixed extents, and a tile begins at a multiple of them, so that every sum has
//! the order of its row's own keys. Tiles that no row of a block sees are left out, and of others the
//! columns behind the last that is seen.
//!
//! Forward, a task has a few blocks and goes through keys once, packing each tile for all of them. The
//! backward pass goes through tiles, and for each through the blocks that see it. With heads enough a
//! task has a whole head, five products; else tasks share heads out twice, by tiles for dk and dv and by
//! blocks for dq, seven products for the same sums in the same order, hence the same bits.

mod backward;
mod forward;
#[cfg(feature = "operation")]
pub(crate) mod operation;
mod rows;
mod tiles;

use xentile::flash_attention::{AttentionShape, FlashAttention};
use xentile::{Element, Result};

pub use crate::Launch;

/// Which keys queries see, for each head of keys.
#[derive(Clone, Copy, Debug)]
pub struct Visible<'a> {
    /// `[N, S, 2]`: the first key of a query and the one behind its last. What lies outside the keys
    /// there are counts for nothing.
    pub ranges: &'a [i32],
    /// `[N, S]` and `[N, K]`: a query sees keys of its own segment alone.
    pub segments: Option<[&'a [i32]; 2]>,
}

/// What attention is made of.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a, E> {
    /// `[N, G, S, D]`.
    pub q: &'a [E],
    /// `[N, K, D]`.
    pub k: &'a [E],
    /// `[N, K, E]`.
    pub v: &'a [E],
}

/// What a forward pass gave.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a, E> {
    /// `[N, G, S, E]`.
    pub o: &'a [E],
    /// `[N, G, S]`.
    pub lse: &'a [f32],
}

/// Cotangents of that.
#[derive(Clone, Copy, Debug)]
pub struct Cotangents<'a, E> {
    /// `[N, G, S, E]`.
    pub o: &'a [E],
    /// `[N, G, S]`.
    pub lse: &'a [f32],
}

/// Where gradients go.
#[derive(Debug)]
pub struct Gradients<'a, E> {
    /// `[N, G, S, D]`.
    pub q: &'a mut [E],
    /// `[N, K, D]`.
    pub k: &'a mut [E],
    /// `[N, K, E]`.
    pub v: &'a mut [E],
    /// `[N, G]`, where there are sinks and their gradient is wanted.
    pub sinks: Option<&'a mut [f32]>,
}

/// Attention of one shape.
#[derive(Clone, Copy)]
pub struct Kernel<'a> {
    options: FlashAttention,
    shape: AttentionShape,
    visible: Visible<'a>,
    sinks: Option<&'a [f32]>,
    launch: Launch<'a>,
}

impl<'a> Kernel<'a> {
    /// A kernel for arrays of `shape`, with `sinks` `[N, G]` or none.
    ///
    /// # Errors
    /// An option outside its range, a shape that no kernel takes, or an argument of another shape.
    pub fn new(
        options: FlashAttention,
        shape: AttentionShape,
        visible: Visible<'a>,
        sinks: Option<&'a [f32]>,
        launch: Launch<'a>,
    ) -> Result<Self> {
        options.validate()?;
        shape.validate()?;
        shape.check_rows("ranges", visible.ranges.len(), 2)?;
        if let Some([queries, keys]) = visible.segments {
            shape.check_rows("q_segments", queries.len(), 1)?;
            shape.check_keys("kv_segments", keys.len(), 1)?;
        }
        if let Some(sinks) = sinks {
            let heads = AttentionShape { queries: 1, ..shape };
            heads.check_queries("sinks", sinks.len(), 1)?;
        }
        Ok(Self { options, shape, visible, sinks, launch })
    }

    /// Writes `o` `[N, G, S, E]` and `lse` `[N, G, S]`.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn forward<E: Element>(
        &self,
        operands: Operands<'_, E>,
        o: &mut [E],
        lse: &mut [f32],
    ) -> Result<()> {
        self.check(operands)?;
        self.shape.check_queries("o", o.len(), self.shape.value_width)?;
        self.shape.check_queries("lse", lse.len(), 1)?;
        forward::run(self, operands, o, lse);
        Ok(())
    }

    /// Writes gradients for `cotangents` of what a forward pass gave.
    ///
    /// # Errors
    /// An argument of another shape.
    pub fn backward<E: Element>(
        &self,
        operands: Operands<'_, E>,
        saved: Saved<'_, E>,
        cotangents: Cotangents<'_, E>,
        gradients: Gradients<'_, E>,
    ) -> Result<()> {
        self.check(operands)?;
        let AttentionShape { width, value_width, .. } = self.shape;
        for (name, length, columns) in [
            ("o", saved.o.len(), value_width),
            ("lse", saved.lse.len(), 1),
            ("do", cotangents.o.len(), value_width),
            ("dlse", cotangents.lse.len(), 1),
            ("dq", gradients.q.len(), width),
        ] {
            self.shape.check_queries(name, length, columns)?;
        }
        self.shape.check_keys("dk", gradients.k.len(), width)?;
        self.shape.check_keys("dv", gradients.v.len(), value_width)?;
        if let Some(sinks) = &gradients.sinks {
            let heads = AttentionShape { queries: 1, ..self.shape };
            heads.check_queries("dsinks", sinks.len(), 1)?;
        }
        backward::run(self, operands, saved, cotangents, gradients);
        Ok(())
    }

    fn check<E>(&self, operands: Operands<'_, E>) -> Result<()> {
        self.shape.check_queries("q", operands.q.len(), self.shape.width)?;
        self.shape.check_keys("k", operands.k.len(), self.shape.width)?;
        self.shape.check_keys("v", operands.v.len(), self.shape.value_width)
    }
}
