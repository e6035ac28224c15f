//! Programs, compiled.

use std::{any::Any, collections::BTreeMap, fmt, sync::Arc};

use crate::{
    CompiledMemoryStats, DType, Error, OptimizedProgram, Plugin, Result,
    abi::{self, Call, Padded},
    raw, value,
};

/// A compiled program, on no device: what there is to know of it.
pub struct Executable {
    plugin: Plugin,
    raw: *mut abi::Executable,
    /// Keeps the client or topology alive, until after the executable.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: PJRT's functions may be called on any thread, and by several at once.
unsafe impl Send for Executable {}
// SAFETY: as above.
unsafe impl Sync for Executable {}

/// What a program returns in one place.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Output {
    /// The type of the elements.
    pub dtype: DType,
    /// The dimensions.
    pub dims: Vec<i64>,
}

impl Executable {
    /// # Safety
    /// `raw` is null or an executable of the plug-in, which nothing else destroys, and which may be
    /// used while `owner` lives.
    pub(crate) unsafe fn new(
        plugin: Plugin,
        owner: Arc<dyn Any + Send + Sync>,
        raw: *mut abi::Executable,
        function: &'static str,
    ) -> Result<Self> {
        if raw.is_null() {
            return Err(Error::malformed(function, "no executable"));
        }
        Ok(Self { plugin, raw, _owner: owner })
    }

    /// The name of the module.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn name(&self) -> Result<String> {
        // SAFETY: the executable is alive, and so is the text.
        unsafe {
            let out = self.call::<abi::ExecutableName>(|args| args.executable = self.raw)?;
            Ok(raw::text(out.executable_name, out.executable_name_size))
        }
    }

    /// How many copies of the program run side by side.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn replicas(&self) -> Result<usize> {
        // SAFETY: the executable is alive.
        let out =
            unsafe { self.call::<abi::ExecutableNumReplicas>(|args| args.executable = self.raw) }?;
        Ok(out.num_replicas)
    }

    /// Into how many parts each copy is cut.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn partitions(&self) -> Result<usize> {
        // SAFETY: the executable is alive.
        let out = unsafe {
            self.call::<abi::ExecutableNumPartitions>(|args| args.executable = self.raw)
        }?;
        Ok(out.num_partitions)
    }

    /// How many buffers the program returns on each device.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn output_count(&self) -> Result<usize> {
        // SAFETY: the executable is alive.
        let out =
            unsafe { self.call::<abi::ExecutableNumOutputs>(|args| args.executable = self.raw) }?;
        Ok(out.num_outputs)
    }

    /// What the program returns on each device.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn outputs(&self) -> Result<Vec<Output>> {
        let types = abi::ExecutableOutputElementTypes::FUNCTION;
        let dims = abi::ExecutableOutputDimensions::FUNCTION;
        // SAFETY: the executable is alive, and the lists are as long as the counts beside them say.
        let (dtypes, ranks, all) = unsafe {
            let out =
                self.call::<abi::ExecutableOutputElementTypes>(|args| args.executable = self.raw)?;
            let dtypes = raw::slice(out.output_types, out.num_output_types);
            let out =
                self.call::<abi::ExecutableOutputDimensions>(|args| args.executable = self.raw)?;
            let ranks = raw::slice(out.dim_sizes, out.num_outputs);
            (dtypes, ranks, raw::slice(out.dims, ranks.iter().sum()))
        };
        if dtypes.len() != ranks.len() {
            let what = format!("{} outputs, and {types} {}", ranks.len(), dtypes.len());
            return Err(Error::malformed(dims, what));
        }
        let mut rest = all;
        dtypes
            .iter()
            .zip(ranks)
            .map(|(&number, &rank)| {
                let (dims, after) = rest.split_at(rank);
                rest = after;
                let dtype = DType::from_u32(number)
                    .ok_or_else(|| Error::malformed(types, format!("elements of type {number}")))?;
                Ok(Output { dtype, dims: dims.into() })
            })
            .collect()
    }

    /// Bytes of machine code; none where the plug-in does not tell.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn code_size(&self) -> Result<Option<u64>> {
        // SAFETY: the executable is alive.
        let out = unsafe {
            self.call::<abi::ExecutableSizeOfGeneratedCodeInBytes>(|args| {
                args.executable = self.raw;
                args.size_in_bytes = -1;
            })
        }?;
        Ok(u64::try_from(out.size_in_bytes).ok().filter(|&size| size > 0))
    }

    /// The same for what was compiled from the same, where the plug-in has such a thing.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn fingerprint(&self) -> Result<Vec<u8>> {
        // SAFETY: the executable is alive, and so are the bytes.
        unsafe {
            let out = self.call::<abi::ExecutableFingerprint>(|args| args.executable = self.raw)?;
            let bytes = out.executable_fingerprint.cast::<u8>();
            Ok(raw::slice(bytes, out.executable_fingerprint_size).to_vec())
        }
    }

    /// What the compiler expects the program to cost, by names of its own such as `flops` and
    /// `bytes accessed`.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn cost_analysis(&self) -> Result<BTreeMap<String, f64>> {
        // SAFETY: the executable is alive, and so are its properties.
        let values = unsafe {
            let out =
                self.call::<abi::ExecutableGetCostAnalysis>(|args| args.executable = self.raw)?;
            value::decode(out.properties, out.num_properties)
        };
        Ok(values.into_iter().filter_map(|(name, value)| Some((name, value.as_f64()?))).collect())
    }

    /// What running the program takes in memory.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn memory_stats(&self) -> Result<CompiledMemoryStats> {
        // SAFETY: the executable is alive.
        let out = unsafe {
            self.call::<abi::ExecutableGetCompiledMemoryStats>(|args| {
                CompiledMemoryStats::prepare(args);
                args.executable = self.raw;
            })
        }?;
        Ok(CompiledMemoryStats::new(&out))
    }

    /// What the compiler made of the program.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn optimized_program(&self) -> Result<OptimizedProgram> {
        let mut program = Padded::<abi::Program>::new();
        self.optimized(&mut program)?;
        let mut code = vec![0_u8; program.code_size];
        program.code = code.as_mut_ptr().cast();
        self.optimized(&mut program)?;
        code.truncate(program.code_size);
        // SAFETY: the plug-in owns the name of the format.
        let format = unsafe { raw::text(program.format, program.format_size) };
        Ok(OptimizedProgram { format, code })
    }

    /// Asks for the size of the program while `program.code` is null, and then for the program.
    fn optimized(&self, program: &mut Padded<abi::Program>) -> Result {
        // SAFETY: the executable is alive, and the code is null or as long as was asked for.
        unsafe {
            self.call::<abi::ExecutableOptimizedProgram>(|args| {
                args.executable = self.raw;
                args.program = program.as_mut_ptr();
            })
        }
        .map(drop)
    }

    /// The program in the plug-in's own format, which the same version of the same plug-in loads:
    /// [`Client::deserialize`](crate::Client::deserialize).
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn serialize(&self) -> Result<Vec<u8>> {
        // SAFETY: the executable is alive, and the bytes are until the deleter is called, once.
        unsafe {
            let out = self.call::<abi::ExecutableSerialize>(|args| args.executable = self.raw)?;
            let bytes = out.serialized_bytes.cast::<u8>();
            let bytes = raw::slice(bytes, out.serialized_bytes_size).to_vec();
            if let Some(delete) = out.serialized_executable_deleter {
                delete(out.serialized_executable);
            }
            Ok(bytes)
        }
    }

    /// # Safety
    /// As for [`Plugin::call`].
    unsafe fn call<A: Call>(&self, fill: impl FnOnce(&mut A)) -> Result<Padded<A>> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.plugin.call(fill) }
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: the executable is alive, and nothing uses it after.
        let _ = unsafe {
            self.plugin.call::<abi::ExecutableDestroy>(|args| args.executable = self.raw)
        };
    }
}

impl fmt::Debug for Executable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executable").field("name", &self.name().ok()).finish()
    }
}
