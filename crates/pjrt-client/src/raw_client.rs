//! The plug-in's object of a client, which lives until the last of what was made with it is gone.

use std::sync::Arc;

use crate::{Error, Plugin, Result, abi};

/// What everything of a client holds.
pub(crate) type Shared = Arc<RawClient>;

pub(crate) struct RawClient {
    pub(crate) plugin: Plugin,
    pub(crate) raw: *mut abi::Client,
}

// SAFETY: PJRT's functions may be called on any thread, and by several at once.
unsafe impl Send for RawClient {}
// SAFETY: as above.
unsafe impl Sync for RawClient {}

impl Drop for RawClient {
    fn drop(&mut self) {
        // SAFETY: nothing of the client is left, as all of it holds this.
        let _ = unsafe { self.plugin.call::<abi::ClientDestroy>(|args| args.client = self.raw) };
    }
}

/// Sees that something of `theirs` may be given to a client.
pub(crate) fn same(ours: &Shared, theirs: &Shared, what: impl FnOnce() -> String) -> Result {
    if Arc::ptr_eq(ours, theirs) { Ok(()) } else { Err(Error::OtherClient { what: what() }) }
}
