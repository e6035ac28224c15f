//! XLA behind the backends `xla:cpu`, `xla:cuda` and `xla:tpu`: a plug-in, opened at run time, with
//! our custom calls where there are any for its platform.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::ptr::null;

use anyhow::{Context, Result, bail, ensure};
use pjrt_client::{
    Buffer, Cache, Cached, Client, Code, CompileOptions, Element, Error, Handlers,
    LoadedExecutable, Place, Platform, Plugin, Value,
};
use xentile::fp8::Format;
use xentile::operation::{Array, ArraySpec, Problem};
use xentile_programs::stablehlo::Builder;
use xentile_programs::{Program, TensorType};
use xentile_xla::TABLE_VERSION;

use crate::cli::one_line;
use crate::exported::tensor_type;
use crate::{memory, tpu};

/// A plug-in with a client.
pub(crate) struct Session {
    client: Client,
    platform: Platform,
    cache: Option<Cache>,
}

/// A program, ready to run.
pub(crate) struct Compiled {
    pub(crate) executable: LoadedExecutable,
    /// Whether it was loaded rather than compiled; none where there is no cache.
    pub(crate) from_cache: Option<bool>,
}

/// Names the cache's directory where neither a flag nor a config does.
const CACHE_VARIABLE: &str = "XENTILE_CACHE";

/// Whether a client takes a GPU's memory as it needs it, instead of three quarters at once, by the
/// variable that JAX reads.
fn shares_gpu() -> bool {
    std::env::var("XLA_PYTHON_CLIENT_PREALLOCATE")
        .is_ok_and(|value| matches!(&*value, "false" | "0"))
}

impl Session {
    /// Opens the plug-in at `path`, else the one that is found for `platform`. Compiled programs are
    /// kept in `cache`, else in what [`CACHE_VARIABLE`] names.
    pub(crate) fn open(
        platform: Platform,
        path: Option<&Path>,
        cache: Option<&Path>,
    ) -> Result<Self> {
        if platform == Platform::Tpu {
            tpu::require()?;
        }
        let plugin = Plugin::find(platform, path)?;
        let options: &[(&str, Value)] = match platform {
            // One device has all threads.
            Platform::Cpu => &[("cpu_device_count", Value::Int(1))],
            Platform::Cuda if shares_gpu() => &[("preallocate", Value::Bool(false))],
            _ => &[],
        };
        let remedy = match platform {
            Platform::Tpu => {
                "; running needs a TPU; microbench --topology v6e:2x2 compiles without one"
            }
            _ => "",
        };
        let client = plugin.client(options).with_context(|| {
            format!("{} opened, but gives no client{remedy}", plugin.path().display())
        })?;
        // One of another platform would run, and be reported as what it is not.
        if let Ok(its) = client.platform_name()?.parse::<Platform>() {
            ensure!(
                its == platform,
                "the plug-in {} runs xla:{its} and not xla:{platform}; name that backend, or another \
                 plug-in",
                plugin.path().display()
            );
        }
        let variable = || std::env::var_os(CACHE_VARIABLE).filter(|value| !value.is_empty());
        let cache = cache.map(PathBuf::from).or_else(|| variable().map(PathBuf::from));
        // SAFETY: the flag's documentation says that nothing else writes there.
        let cache = cache.map(|directory| unsafe { Cache::new(directory) });
        Ok(Self { client, platform, cache })
    }

    /// Has programs call our kernels.
    pub(crate) fn register_kernels(&self) -> Result<()> {
        let mut stages: BTreeMap<&str, [*const std::ffi::c_void; 4]> = BTreeMap::new();
        let platform = registry_name(self.platform);
        for row in xentile_xla::targets().iter().filter(|row| row.platform() == platform) {
            stages.entry(row.target()).or_insert([null(); 4])[row.stage() as usize] =
                row.handler() as *const _;
        }
        ensure!(
            !stages.is_empty(),
            "no kernels for xla:{} in this build; --impl reference runs there, and what JAX exported \
             for it by --program",
            self.platform.name()
        );
        for (target, [instantiate, prepare, initialize, execute]) in stages {
            let handlers = Handlers { instantiate, prepare, initialize, execute };
            // SAFETY: the table's handlers are those of this program, which outlive it all.
            unsafe { self.client.plugin().register(target, platform, handlers) }?;
        }
        Ok(())
    }

    /// What ran: the name of the plug-in's file, its version of PJRT, and its platform.
    pub(crate) fn describe(&self) -> Result<String> {
        let plugin = self.client.plugin();
        Ok(describe(plugin, &self.client.platform_name()?, &self.client.platform_version()?))
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// An array on the device.
    pub(crate) fn upload<T: Element>(&self, data: &[T], dims: &[usize]) -> Result<Buffer> {
        let dims: Vec<_> = dims.iter().map(|&extent| extent as i64).collect();
        Ok(self.client.buffer(data, &dims)?)
    }

    /// A matrix on the device, its rows in order on TPUs, where it might else be its transpose that
    /// lies in memory and programs do not take it: see [`for_platform`].
    pub(crate) fn upload_matrix<T: Element>(&self, data: &[T], ty: &TensorType) -> Result<Buffer> {
        let matrix = self.upload(data, &ty.dims)?;
        if self.platform != Platform::Tpu {
            return Ok(matrix);
        }
        let program = rows_in_order(ty);
        let results = self.compile_code(program.text.as_bytes())?.executable.execute(&[&matrix])?;
        results.into_iter().next().context("the program of a matrix gives one result")
    }

    /// Numbers of a byte each on the device.
    fn upload_bits(
        &self,
        bits: &[u8],
        dtype: pjrt_client::DType,
        dims: &[usize],
    ) -> Result<Buffer> {
        let dims: Vec<_> = dims.iter().map(|&extent| extent as i64).collect();
        Ok(self.client.buffer_from_bytes(bits, dtype, &dims, Place::Default)?)
    }

    /// Labels or other columns on the device, in the 32 bits that programs read.
    fn upload_indices(&self, indices: &[i64], ty: &TensorType) -> Result<Buffer> {
        let narrow = |&index: &i64| {
            i32::try_from(index).with_context(|| format!("label {index} does not fit 32 bits"))
        };
        upload_by_rank(self, &indices.iter().map(narrow).collect::<Result<Vec<_>>>()?, ty)
    }

    /// The program, ready to run.
    pub(crate) fn compile(&self, program: &Program) -> Result<Compiled> {
        self.compile_code(for_platform(self.platform, program.clone()).text.as_bytes())
    }

    /// A program as StableHLO text or bytecode, ready to run. A program that the cache
    /// cannot hold is named on standard error.
    pub(crate) fn compile_code(&self, code: &[u8]) -> Result<Compiled> {
        let code = pjrt_client::Program::mlir(code);
        let options = CompileOptions::new();
        let compiled = match &self.cache {
            None => {
                let executable = self.client.compile(&code, &options)?;
                Compiled { executable, from_cache: None }
            }
            Some(cache) => {
                // Programs hold the names of our custom calls, and not what those compute.
                let kernels = format!("xentile {} {TABLE_VERSION}", env!("CARGO_PKG_VERSION"));
                let Cached { executable, is_hit, problem, .. } =
                    cache.compile(&self.client, &code, &options, &[&kernels])?;
                if let Some(problem) = problem {
                    eprintln!("warning: {}", one_line(&problem.to_string()));
                }
                Compiled { executable, from_cache: Some(is_hit) }
            }
        };
        self.check_memory(&compiled.executable)?;
        Ok(compiled)
    }

    /// Refuses a program whose results and temporaries the machine has no memory for, where the
    /// device's memory is the machine's: a system that promises more than it has ends the process
    /// instead of failing the allocation.
    fn check_memory(&self, program: &LoadedExecutable) -> Result<()> {
        if self.platform != Platform::Cpu {
            return Ok(());
        }
        let needed = program.executable().memory_stats().ok().and_then(|stats| stats.needed());
        needed.zip(memory::available_bytes()).map_or(Ok(()), |(needed, available)| {
            fits(needed, available).map_err(anyhow::Error::from)
        })
    }
}

/// An array on the device, as `spec` has it there.
pub(crate) fn upload(
    session: &Session,
    spec: &ArraySpec,
    problem: &Problem,
    array: &Array<'_>,
) -> Result<Buffer> {
    let ty = tensor_type(spec, problem);
    let floats = |session: &Session| match array {
        Array::F32(elements) => upload_by_rank(session, elements, &ty),
        Array::Bf16(elements) => upload_by_rank(session, elements, &ty),
        Array::F16(elements) => upload_by_rank(session, elements, &ty),
        Array::F64(_) => bail!("{} is in float64, which no device takes", spec.name),
        Array::I64(elements) => session.upload_indices(elements, &ty),
        Array::U8(elements) => upload_by_rank(session, elements, &ty),
        Array::F8(format, bits) => session.upload_bits(bits, fp8(*format), &ty.dims),
    };
    floats(session)
}

fn upload_by_rank<T: Element>(
    session: &Session,
    elements: &[T],
    ty: &TensorType,
) -> Result<Buffer> {
    match ty.dims.len() {
        2 => session.upload_matrix(elements, ty),
        _ => session.upload(elements, &ty.dims),
    }
}

/// Copies a result to the host. A scalar that is there in float64 comes in f32.
pub(crate) fn read(buffer: &Buffer, array: &mut Array<'_>) -> Result<()> {
    match array {
        Array::F32(elements) => buffer.copy_to(elements.to_mut())?,
        Array::Bf16(elements) => buffer.copy_to(elements.to_mut())?,
        Array::F16(elements) => buffer.copy_to(elements.to_mut())?,
        Array::F64(elements) => {
            for (to, from) in elements.to_mut().iter_mut().zip(buffer.to_vec::<f32>()?) {
                *to = from.into();
            }
        }
        Array::U8(elements) => buffer.copy_to(elements.to_mut())?,
        Array::I64(_) => bail!("no program gives integers of 64 bits"),
        Array::F8(format, bits) => {
            let (found, wanted) = (buffer.dtype()?, fp8(*format));
            ensure!(found == wanted, "a result is {found}; it must be {wanted}");
            let read = buffer.to_bytes()?;
            let (found, wanted) = (read.len(), bits.len());
            ensure!(found == wanted, "a result holds {found} elements; it must hold {wanted}");
            *bits = read.into();
        }
    }
    Ok(())
}

/// PJRT's type of a format's numbers.
fn fp8(format: Format) -> pjrt_client::DType {
    match format {
        Format::E4M3Fn => pjrt_client::DType::F8E4M3FN,
        Format::E5M2 => pjrt_client::DType::F8E5M2,
    }
}

/// The same matrix with its rows in order, however they come.
fn rows_in_order(ty: &TensorType) -> Program {
    let b = Builder::new("rows_in_order", std::slice::from_ref(ty));
    let same = b.argument(0);
    b.finish(&[&same]).with_results_in_order()
}

/// This build's program as it is compiled for a platform: on TPUs with rows in order at its border, as
/// programs of `pallas_bridge` have them and matrices in the middle of a real program.
pub(crate) fn for_platform(platform: Platform, program: Program) -> Program {
    match platform {
        Platform::Tpu => program.with_rows_in_order(),
        _ => program,
    }
}

/// The name of the plug-in's file, its version of PJRT, and its platform.
pub(crate) fn describe(plugin: Plugin, platform: &str, version: &str) -> String {
    let version = version.split_whitespace().collect::<Vec<_>>().join(" ");
    let file = plugin.path().file_name().unwrap_or_default().to_string_lossy();
    format!("{file}, PJRT {}, {platform} {version}", plugin.version())
}

/// The error of a run that takes `needed` bytes where `available` are.
fn fits(needed: u64, available: u64) -> pjrt_client::Result {
    if needed <= available {
        return Ok(());
    }
    Err(Error::OutOfMemory {
        requested: Some(needed),
        available: Some(available),
        limit: None,
        code: Code::ResourceExhausted,
        message: "the program was compiled and not run, as its results and temporaries \
                          do not fit the machine's memory"
            .into(),
        function: "PJRT_LoadedExecutable_Execute",
    })
}

/// XLA's name for a platform, where handlers are registered.
fn registry_name(platform: Platform) -> &'static str {
    match platform {
        Platform::Cpu => "Host",
        Platform::Cuda => "CUDA",
        // There are no custom calls on others.
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use pjrt_client::Topology;
    use xentile_programs::ElementType;

    use super::*;

    #[test]
    #[ignore = "needs libtpu in XENTILE_PJRT_TPU"]
    fn a_matrix_is_put_in_the_order_that_programs_take() {
        let plugin = Plugin::find(Platform::Tpu, None).unwrap();
        let v6e = Topology::new(plugin, "v6e:2x2", &[]).unwrap();
        let stats = |program: &Program| {
            let program = pjrt_client::Program::mlir(program.text.as_bytes());
            let stats = v6e.compile(&program, &CompileOptions::new()).unwrap().memory_stats();
            let stats = stats.unwrap();
            (stats.arguments.unwrap(), stats.outputs.unwrap())
        };
        // Columns are padded to a multiple of 128, and of 16 in the transpose, which libtpu prefers.
        let (transposed, in_order) = (2048 * 1008 * 2, 2048 * 1024 * 2);
        let ty = TensorType::new(&[2048, 1003], ElementType::Bf16);
        assert_eq!(stats(&rows_in_order(&ty)), (transposed, in_order));
        let mut b = Builder::new("negated", &[ty]);
        let x = b.argument(0);
        let y = b.unary("negate", &x);
        let negated = for_platform(Platform::Tpu, b.finish(&[&y]).donating(0));
        assert_eq!(stats(&negated), (2 * in_order, in_order));
    }

    #[test]
    fn out_of_memory_names_both_sizes() {
        fits(5, 5).unwrap();
        let error = fits(3 << 30, 1 << 30).unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error:?}");
        let text = error.to_string();
        let expected = "out of device memory: 3.00 GiB asked for; 1.00 GiB available: ";
        assert!(text.contains(expected), "{text}");
    }
}
