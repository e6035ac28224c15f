//! Figures about memory. What a plug-in does not tell is `None`, never zero.

use crate::abi;

macro_rules! figures {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
        #[non_exhaustive]
        pub struct $name {
            $($(#[$field_doc])* pub $field: Option<u64>,)*
        }

        impl $name {
            /// Every figure by name.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, Option<u64>)> {
                [$((stringify!($field), self.$field),)*].into_iter()
            }
        }
    };
}

figures! {
    /// What a device's allocator counts, in bytes but for the number of allocations. Peaks are
    /// those of the client's life.
    MemoryStats {
        /// In use now.
        bytes_in_use,
        /// The most that was in use at once.
        peak_bytes_in_use,
        /// How many allocations there were.
        num_allocs,
        /// The largest of them.
        largest_alloc_size,
        /// The most that may be in use.
        bytes_limit,
        /// Reserved now.
        bytes_reserved,
        /// The most that was reserved at once.
        peak_bytes_reserved,
        /// The most that may be reserved.
        bytes_reservable_limit,
        /// The largest piece that is free.
        largest_free_block_bytes,
        /// Held by the allocator, in use or not.
        pool_bytes,
        /// The most that it held at once.
        peak_pool_bytes,
    }
}

figures! {
    /// What running a program takes, in bytes, as the compiler knows it.
    CompiledMemoryStats {
        /// Machine code.
        generated_code,
        /// Arguments.
        arguments,
        /// Results.
        outputs,
        /// The part of the results that lies in donated arguments.
        alias,
        /// Memory that lives while the program runs.
        temporaries,
        /// The most that lives at once.
        peak,
        /// Machine code in the host's memory.
        host_generated_code,
        /// Arguments in the host's memory.
        host_arguments,
        /// Results in the host's memory.
        host_outputs,
        /// The part of those results that lies in donated arguments.
        host_alias,
        /// Memory of the host that lives while the program runs.
        host_temporaries,
    }
}

impl MemoryStats {
    pub(crate) fn new(stats: &abi::DeviceMemoryStats) -> Self {
        let reported = |value: i64, is_set: u8| u64::try_from(value).ok().filter(|_| is_set != 0);
        macro_rules! reported {
            ($($field:ident: $is_set:ident,)*) => {
                Self {
                    bytes_in_use: reported(stats.bytes_in_use, 1),
                    $($field: reported(stats.$field, stats.$is_set),)*
                }
            };
        }
        reported! {
            peak_bytes_in_use: peak_bytes_in_use_is_set,
            num_allocs: num_allocs_is_set,
            largest_alloc_size: largest_alloc_size_is_set,
            bytes_limit: bytes_limit_is_set,
            bytes_reserved: bytes_reserved_is_set,
            peak_bytes_reserved: peak_bytes_reserved_is_set,
            bytes_reservable_limit: bytes_reservable_limit_is_set,
            largest_free_block_bytes: largest_free_block_bytes_is_set,
            pool_bytes: pool_bytes_is_set,
            peak_pool_bytes: peak_pool_bytes_is_set,
        }
    }
}

impl CompiledMemoryStats {
    /// Bytes that a run takes beyond its arguments: results that lie in no argument, and
    /// temporaries. None where the plug-in tells of neither.
    #[must_use]
    pub fn needed(&self) -> Option<u64> {
        let results = self.outputs.map(|all| all.saturating_sub(self.alias.unwrap_or(0)));
        let known = [results, self.temporaries];
        known.iter().any(Option::is_some).then(|| known.iter().flatten().sum())
    }

    /// Marks every figure as not reported, before the plug-in writes those that it knows of.
    pub(crate) fn prepare(stats: &mut abi::ExecutableGetCompiledMemoryStats) {
        stats.generated_code_size_in_bytes = -1;
        stats.argument_size_in_bytes = -1;
        stats.output_size_in_bytes = -1;
        stats.alias_size_in_bytes = -1;
        stats.temp_size_in_bytes = -1;
        stats.host_generated_code_size_in_bytes = -1;
        stats.host_argument_size_in_bytes = -1;
        stats.host_output_size_in_bytes = -1;
        stats.host_alias_size_in_bytes = -1;
        stats.host_temp_size_in_bytes = -1;
        stats.peak_memory_in_bytes = -1;
    }

    pub(crate) fn new(stats: &abi::ExecutableGetCompiledMemoryStats) -> Self {
        let reported = |value: i64| u64::try_from(value).ok();
        let (arguments, outputs) =
            (reported(stats.argument_size_in_bytes), reported(stats.output_size_in_bytes));
        let holds = arguments.unwrap_or(0) + outputs.unwrap_or(0) > 0;
        Self {
            // Code has a size: 0 is a plug-in that does not count it.
            generated_code: reported(stats.generated_code_size_in_bytes).filter(|&size| size > 0),
            arguments,
            outputs,
            alias: reported(stats.alias_size_in_bytes),
            temporaries: reported(stats.temp_size_in_bytes),
            // So has what a program holds.
            peak: reported(stats.peak_memory_in_bytes).filter(|&peak| peak > 0 || !holds),
            host_generated_code: reported(stats.host_generated_code_size_in_bytes),
            host_arguments: reported(stats.host_argument_size_in_bytes),
            host_outputs: reported(stats.host_output_size_in_bytes),
            host_alias: reported(stats.host_alias_size_in_bytes),
            host_temporaries: reported(stats.host_temp_size_in_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::Padded;

    #[test]
    fn missing_statistics_are_none() {
        let mut stats = Padded::<abi::DeviceMemoryStats>::new();
        stats.bytes_in_use = -1;
        stats.pool_bytes = 7;
        stats.peak_pool_bytes = 9;
        stats.peak_pool_bytes_is_set = 1;
        stats.bytes_limit_is_set = 1;
        let stats = MemoryStats::new(&stats);
        let reported: Vec<_> = stats.iter().filter(|figure| figure.1.is_some()).collect();
        assert_eq!(reported, [("bytes_limit", Some(0)), ("peak_pool_bytes", Some(9))]);

        let mut stats = Padded::<abi::ExecutableGetCompiledMemoryStats>::new();
        CompiledMemoryStats::prepare(&mut stats);
        assert!(CompiledMemoryStats::new(&stats).iter().all(|figure| figure.1.is_none()));
        assert_eq!(CompiledMemoryStats::new(&stats).needed(), None);
        stats.temp_size_in_bytes = 5;
        stats.output_size_in_bytes = 12;
        stats.alias_size_in_bytes = 8;
        assert_eq!(CompiledMemoryStats::new(&stats).needed(), Some(9));
        stats.argument_size_in_bytes = 4;
        stats.peak_memory_in_bytes = 0;
        assert_eq!(CompiledMemoryStats::new(&stats).peak, None);
    }
}
