//! What is made once for each of its kind, and kept for good.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{PoisonError, RwLock};

use crate::Result;

/// Values by their keys, for statics.
pub(crate) struct Cache<K, V>(RwLock<Option<HashMap<K, V>>>);

impl<K: Eq + Hash, V: Copy> Cache<K, V> {
    pub(crate) const fn new() -> Self {
        Self(RwLock::new(None))
    }

    /// What `key` stands for, which `make` makes where it is not there yet.
    ///
    /// No lock is held meanwhile: what loads code may wait for a kernel on its device that waits for
    /// another device, whose thread would wait for the lock. Of what two threads make at once, the
    /// first is kept.
    ///
    /// # Errors
    /// Those of `make`, which are not kept.
    pub(crate) fn get(&self, key: K, make: impl FnOnce(&K) -> Result<V>) -> Result<V> {
        let kept = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(&value) = kept.as_ref().and_then(|kept| kept.get(&key)) {
            return Ok(value);
        }
        drop(kept);
        let value = make(&key)?;
        let mut kept = self.0.write().unwrap_or_else(PoisonError::into_inner);
        Ok(*kept.get_or_insert_default().entry(key).or_insert(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn values_are_cached_and_errors_are_not() {
        let cache = Cache::new();
        assert_eq!(cache.get("a", |_| Err::<i32, _>(Error::NoDevice)), Err(Error::NoDevice));
        assert_eq!(cache.get("a", |key| Ok(key.len() as i32)), Ok(1));
        assert_eq!(cache.get("a", |_| Err(Error::NoDevice)), Ok(1));
        assert_eq!(cache.get("bc", |key| Ok(key.len() as i32)), Ok(2));
    }

    #[test]
    fn the_first_value_of_a_key_is_kept() {
        let cache = Cache::new();
        let made = cache.get(1, |_| {
            cache.get(1, |_| Ok("first"))?;
            Ok("second")
        });
        assert_eq!(made, Ok("first"));
    }
}
