//! Programs on devices, and running them.

use std::{
    fmt,
    ptr::{null, null_mut},
    sync::atomic::{AtomicBool, Ordering},
};

use crate::{
    Buffer, Device, Error, Event, Executable, Plugin, Result,
    abi::{self, Call, Padded},
    device,
    raw_client::{self, Shared},
};

/// A program on the devices that it was compiled for, to be run any number of times and by any
/// number of threads.
pub struct LoadedExecutable {
    // Dropped before the client.
    executable: Executable,
    outputs: usize,
    raw: *mut abi::LoadedExecutable,
    /// As not every plug-in remembers.
    deleted: AtomicBool,
    client: Shared,
}

// SAFETY: PJRT's functions may be called on any thread, and by several at once.
unsafe impl Send for LoadedExecutable {}
// SAFETY: as above.
unsafe impl Sync for LoadedExecutable {}

/// How a program is run.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct ExecuteOptions<'a> {
    /// Arguments, by number, that stay the caller's though the program would take them over.
    pub keep: &'a [i64],
    /// The device to run on, for a portable program.
    pub device: Option<&'a Device>,
    /// Tells apart runs that several processes take part in; 0 for none.
    pub launch_id: i32,
}

impl<'a> ExecuteOptions<'a> {
    /// The device to run on.
    #[must_use]
    pub const fn on(mut self, device: &'a Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Arguments, by number, that stay the caller's though the program would take them over.
    #[must_use]
    pub const fn keep(mut self, arguments: &'a [i64]) -> Self {
        self.keep = arguments;
        self
    }
}

/// A run under way on one device.
#[derive(Debug)]
pub struct Execution {
    /// The results. They can be used before they are there.
    pub outputs: Vec<Buffer>,
    /// The end of the run.
    pub done: Event,
}

impl Execution {
    /// Waits for the end of the run.
    ///
    /// # Errors
    /// The run failed.
    pub fn wait(self) -> Result<Vec<Buffer>> {
        self.done.wait()?;
        Ok(self.outputs)
    }
}

impl LoadedExecutable {
    /// # Safety
    /// `raw` is null or an executable of `client`, which nothing else destroys.
    pub(crate) unsafe fn new(
        client: Shared,
        raw: *mut abi::LoadedExecutable,
        function: &'static str,
    ) -> Result<Self> {
        if raw.is_null() {
            return Err(Error::malformed(function, "no executable"));
        }
        // Destroys it where the rest fails.
        let loaded = Raw { plugin: client.plugin, raw };
        // SAFETY: it is alive.
        let out = unsafe {
            client.plugin.call::<abi::LoadedExecutableGetExecutable>(|args| {
                args.loaded_executable = raw;
            })
        }?;
        let name = abi::LoadedExecutableGetExecutable::FUNCTION;
        // SAFETY: it is new, and the caller's to destroy.
        let executable =
            unsafe { Executable::new(client.plugin, client.clone(), out.executable, name) }?;
        let outputs = executable.output_count()?;
        std::mem::forget(loaded);
        Ok(Self { executable, outputs, raw, deleted: AtomicBool::new(false), client })
    }

    /// What there is to know of the program.
    #[must_use]
    pub const fn executable(&self) -> &Executable {
        &self.executable
    }

    /// The devices of this process that the program runs on.
    ///
    /// # Errors
    /// The program is deleted, or the plug-in reports one.
    pub fn devices(&self) -> Result<Vec<Device>> {
        self.alive()?;
        // SAFETY: the executable is alive, and so is the list, whose devices the client owns.
        unsafe {
            let out = self.call::<abi::LoadedExecutableAddressableDevices>(|args| {
                args.executable = self.raw;
            })?;
            Ok(Device::list(&self.client, out.addressable_devices, out.num_addressable_devices))
        }
    }

    /// Runs the program on one device, and waits for the end.
    ///
    /// # Errors
    /// The arguments do not fit the program, or it failed.
    pub fn execute(&self, arguments: &[&Buffer]) -> Result<Vec<Buffer>> {
        let run = self.execute_async(arguments, &ExecuteOptions::default())?;
        run.wait().map_err(|error| self.explain(error))
    }

    /// Runs the program on one device without waiting for the end. The arguments may be dropped,
    /// and those that the program takes over are [deleted](Buffer::is_deleted) when this returns.
    ///
    /// # Errors
    /// The arguments do not fit the program, or it failed at once.
    pub fn execute_async(
        &self,
        arguments: &[&Buffer],
        options: &ExecuteOptions<'_>,
    ) -> Result<Execution> {
        let mut executions = self.execute_sharded(&[arguments], options)?;
        executions.pop().ok_or_else(|| {
            Error::malformed(abi::LoadedExecutableExecute::FUNCTION, "nothing for the device")
        })
    }

    /// Runs the program on every device that it was compiled for, without waiting for the end:
    /// `arguments` has a list for each of [`Self::devices`].
    ///
    /// # Errors
    /// The arguments do not fit the program, or it failed at once.
    pub fn execute_sharded(
        &self,
        arguments: &[&[&Buffer]],
        options: &ExecuteOptions<'_>,
    ) -> Result<Vec<Execution>> {
        self.alive()?;
        let count = arguments.first().map_or(0, |list| list.len());
        if let Some(list) = arguments.iter().find(|list| list.len() != count) {
            return Err(Error::Arguments(format!(
                "{} arguments for one device, and {count} for the first: all must have as many",
                list.len()
            )));
        }
        for buffers in arguments {
            for (number, buffer) in buffers.iter().enumerate() {
                raw_client::same(&self.client, &buffer.client, || format!("argument {number}"))?;
            }
        }
        let device = match options.device {
            Some(device) => device.of(&self.client, || "the device".into())?,
            None => null_mut(),
        };
        self.launch(arguments, count, options, device)
    }

    fn launch(
        &self,
        arguments: &[&[&Buffer]],
        count: usize,
        options: &ExecuteOptions<'_>,
        device: *mut abi::Device,
    ) -> Result<Vec<Execution>> {
        let devices = arguments.len();
        let pointers: Vec<*mut abi::Buffer> =
            arguments.iter().flat_map(|list| list.iter().map(|buffer| buffer.raw)).collect();
        // No list is null, as an empty one is of no device.
        let lists: Vec<*const *mut abi::Buffer> =
            (0..devices).map(|index| pointers[index * count..].as_ptr()).collect();
        let mut results = vec![null_mut::<abi::Buffer>(); devices * self.outputs];
        let start = results.as_mut_ptr();
        let result_lists: Vec<*mut *mut abi::Buffer> =
            (0..devices).map(|index| start.wrapping_add(index * self.outputs)).collect();
        let mut events = vec![null_mut::<abi::Event>(); devices];

        let mut how = Padded::<abi::ExecuteOptions>::new();
        how.launch_id = options.launch_id;
        how.non_donatable_input_indices =
            if options.keep.is_empty() { null() } else { options.keep.as_ptr() };
        how.num_non_donatable_input_indices = options.keep.len();
        // SAFETY: the executable and the buffers are alive, lists are as long as is said, with room
        // for each result and event, and all of it lives for the call.
        unsafe {
            self.call::<abi::LoadedExecutableExecute>(|args| {
                args.executable = self.raw;
                args.options = how.as_mut_ptr();
                args.argument_lists = lists.as_ptr();
                args.num_devices = devices;
                args.num_args = count;
                args.output_lists = result_lists.as_ptr();
                args.device_complete_events = events.as_mut_ptr();
                args.execute_device = device;
            })
        }
        .map_err(|error| self.explain(error))?;
        self.take(&results, &events)
    }

    /// Adds to an error of a run what is known of memory, where that ran out.
    fn explain(&self, error: Error) -> Error {
        let takes = || self.executable.memory_stats().ok()?.needed();
        error.with_memory(|| device::memory_stats(&self.client)).with_program(takes)
    }

    /// Takes results and events over.
    fn take(
        &self,
        results: &[*mut abi::Buffer],
        events: &[*mut abi::Event],
    ) -> Result<Vec<Execution>> {
        let name = abi::LoadedExecutableExecute::FUNCTION;
        // SAFETY: each is new, and the caller's to destroy. All are taken before one that is null
        // is an error.
        let results: Vec<Result<Buffer>> = unsafe {
            results.iter().map(|&raw| Buffer::new(self.client.clone(), raw, name)).collect()
        };
        // SAFETY: as above.
        let events: Vec<Result<Event>> = unsafe {
            events.iter().map(|&raw| Event::new(self.client.clone(), raw, name)).collect()
        };
        let mut results = results.into_iter();
        events
            .into_iter()
            .map(|done| {
                let outputs = results.by_ref().take(self.outputs).collect::<Result<_>>()?;
                Ok(Execution { outputs, done: done? })
            })
            .collect()
    }

    /// Unloads the program, once the runs under way have ended. Deleting twice is no error.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn delete(&self) -> Result {
        if self.deleted.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        // SAFETY: the executable is alive.
        unsafe { self.call::<abi::LoadedExecutableDelete>(|args| args.executable = self.raw) }
            .map(drop)
    }

    /// Whether the program was unloaded.
    ///
    /// # Errors
    /// The plug-in reports one.
    pub fn is_deleted(&self) -> Result<bool> {
        if self.deleted.load(Ordering::Acquire) {
            return Ok(true);
        }
        // SAFETY: the executable is alive; this may be asked of one that is deleted.
        let out = unsafe {
            self.call::<abi::LoadedExecutableIsDeleted>(|args| args.executable = self.raw)
        }?;
        Ok(out.is_deleted != 0)
    }

    /// PJRT allows nothing else to be asked of a deleted executable.
    fn alive(&self) -> Result {
        if self.is_deleted()? { Err(Error::Unloaded) } else { Ok(()) }
    }

    /// # Safety
    /// As for [`Plugin::call`].
    unsafe fn call<A: Call>(&self, fill: impl FnOnce(&mut A)) -> Result<Padded<A>> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.client.plugin.call(fill) }
    }
}

impl Drop for LoadedExecutable {
    fn drop(&mut self) {
        drop(Raw { plugin: self.client.plugin, raw: self.raw });
    }
}

impl fmt::Debug for LoadedExecutable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedExecutable")
            .field("name", &self.executable.name().ok())
            .field("devices", &self.devices().ok())
            .finish()
    }
}

/// The plug-in's object.
struct Raw {
    plugin: Plugin,
    raw: *mut abi::LoadedExecutable,
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: the executable is alive, and nothing uses it after.
        let _ = unsafe {
            self.plugin.call::<abi::LoadedExecutableDestroy>(|args| args.executable = self.raw)
        };
    }
}
