//! With the feature `kernels`, compiles `kernels/*.cu` to one fat binary, which the library embeds.
//!
//! The compiler is `XENTILE_NVCC`, else that of `CUDA_HOME`, else the one in `PATH`, else the one
//! that wheels put into the project's virtual environment. `XENTILE_CUDA_ARCHS`, such as `90a` or
//! `80,90a`, leaves out all other architectures and PTX: shorter builds for development.
//! `XENTILE_CUDA_FAST_COMPILE=1` compiles kernels to PTX with few optimisations, and assembles one of them,
//! in a tenth of the time: ptxas looks for errors in all. Nothing runs then but that one.

use std::collections::hash_map::DefaultHasher;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// What is compiled for: Ampere and Ada, Hopper, and the two kinds of Blackwell.
const ARCHITECTURES: &str = "80,90a,100a,120";
/// What the driver compiles for GPUs that are none of these.
const PTX: &str = "-gencode=arch=compute_90,code=compute_90";

/// What ptxas says where it has products of a warpgroup wait for each other: right, and slow.
const SERIALIZED: [&str; 3] = ["C7510", "C7517", "C7519"];

/// The one kernel that is assembled where none is to run: without an entry ptxas assembles all.
const ASSEMBLED: &str = "round_bf16";

const INSTALL: &str = "pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' \
                       'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-runtime==13.0.*' \
                       'nvidia-cuda-cccl==13.0.*'";

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            println!("cargo::error={}", message.replace('\n', " "));
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), String> {
    // Without kernels nothing below is read: what is compiled stays when it changes.
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_KERNELS").is_none() {
        return Ok(());
    }
    for variable in ["XENTILE_NVCC", "CUDA_HOME", "XENTILE_CUDA_ARCHS", "XENTILE_CUDA_FAST_COMPILE"]
    {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    for path in ["kernels", "src"] {
        println!("cargo::rerun-if-changed={path}");
    }
    let package = PathBuf::from(variable("CARGO_MANIFEST_DIR")?);
    let nvcc = find_nvcc(&package)?;
    let version = output(Command::new(&nvcc).arg("--version"))?;
    let number = version_number(&version)
        .ok_or_else(|| format!("`{} --version` names no release: {version}", nvcc.display()))?;
    if number < 12_080 {
        return Err(format!(
            "{} is of CUDA {}.{}, which knows no Blackwell; 12.8 does: {INSTALL}",
            nvcc.display(),
            number / 1000,
            number % 1000 / 10
        ));
    }
    println!("cargo::rustc-env=XENTILE_CUDA_VERSION={number}");

    let kernels = package.join("kernels");
    let program = program(&kernels, &package.join("src"))?;
    let flags = flags()?;
    let mut hasher = DefaultHasher::new();
    (&program, &flags, &version).hash(&mut hasher);
    for file in files(&kernels)? {
        (file.file_name(), read(&file)?).hash(&mut hasher);
    }

    // Beside the folders of profiles and of targets, so that they share what they compiled.
    let out = PathBuf::from(variable("OUT_DIR")?);
    let profiles = out.ancestors().nth(4).unwrap_or(&out);
    let of_target = profiles.file_name() == std::env::var_os("TARGET").as_deref();
    let shared = profiles.parent().filter(|_| of_target).unwrap_or(profiles);
    let cache = shared.join("xentile-cuda");
    let compiled = cache.join(format!("{:016x}.fatbin", hasher.finish()));
    let embedded = out.join("kernels.fatbin");
    if !compiled.is_file() {
        let source = out.join("kernels.cu");
        write(&source, &program)?;
        let mut command = Command::new(&nvcc);
        command.args(&flags).arg("-I").arg(&kernels).arg("-o").arg(&embedded).arg(&source);
        for line in output(&mut command)?.lines() {
            if SERIALIZED.iter().any(|code| line.contains(code)) {
                println!("cargo::warning={line}");
            }
        }
        fs::create_dir_all(&cache).map_err(|error| format!("{}: {error}", cache.display()))?;
        // Renamed, so that a build beside this one never sees half a file.
        let partial = compiled.with_extension(std::process::id().to_string());
        copy(&embedded, &partial)?;
        fs::rename(&partial, &compiled)
            .map_err(|error| format!("{}: {error}", compiled.display()))?;
    }
    copy(&compiled, &embedded)
}

/// One source of all kernels, with what the two languages must agree on.
fn program(kernels: &Path, sources: &Path) -> Result<String, String> {
    let mut program = String::from("#include <cstddef>\n#include <cuda.h>\n");
    for file in files(kernels)?.iter().filter(|file| file.extension() == Some(OsStr::new("cu"))) {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        _ = writeln!(program, "#include \"{name}\"");
    }
    let mirrored = Mirrored::read_folder(sources)?;
    // Not all architectures have all kernels; the newest have.
    program.push_str("#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900\n");
    for (name, value) in &mirrored.numbers {
        _ = writeln!(program, "static_assert({name} == {value});");
    }
    program.push_str("#endif\n");
    for of in &mirrored.structs {
        let (layout, offsets) = mirrored.layout(of)?;
        _ = writeln!(program, "static_assert(sizeof({}) == {});", of.cpp, layout.size);
        for ((field, _), offset) in of.fields.iter().zip(offsets) {
            _ = writeln!(program, "static_assert(offsetof({}, {field}) == {offset});", of.cpp);
        }
    }
    Ok(program)
}

/// Every `mirror!` and `numbers!` of the sources; src/mirror.rs has the grammar.
#[derive(Default)]
struct Mirrored {
    structs: Vec<Struct>,
    /// Names of C++, and values as both languages write them.
    numbers: Vec<(String, String)>,
}

/// A struct of `mirror!`.
struct Struct {
    /// Its file, without the folder of all sources.
    file: PathBuf,
    rust: String,
    cpp: String,
    align: usize,
    /// Names and types.
    fields: Vec<(String, String)>,
}

#[derive(Clone, Copy)]
struct Layout {
    size: usize,
    align: usize,
}

impl Mirrored {
    fn read_folder(sources: &Path) -> Result<Self, String> {
        let mut found = Self::default();
        let mut folders = vec![sources.to_path_buf()];
        while let Some(folder) = folders.pop() {
            for path in files(&folder)? {
                let file = path.strip_prefix(sources).unwrap_or(&path).to_path_buf();
                match path.extension() {
                    None => folders.push(path),
                    Some(end) if end == "rs" && !path.ends_with("mirror.rs") => {
                        found.add(file, &read(&path)?)?;
                    }
                    Some(_) => {}
                }
            }
        }
        Ok(found)
    }

    /// Adds the invocations in `text`, the one of `file`.
    fn add(&mut self, file: PathBuf, text: &[u8]) -> Result<(), String> {
        let text = String::from_utf8_lossy(text);
        let lines: Vec<_> =
            text.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
        let wrong = |body: &str| format!("src/{}: unreadable mirror: {body}", file.display());
        for (number, line) in lines.iter().enumerate() {
            let body = || {
                let body = lines[number + 1..].iter().take_while(|line| **line != "}");
                body.map(|line| line.trim()).collect::<Vec<_>>().join(" ")
            };
            if *line == "numbers! {" {
                for one in body().split_terminator(';') {
                    let (_, pair) = one.split_once('=').ok_or_else(|| wrong(one))?;
                    let (name, value) = pair.split_once(',').ok_or_else(|| wrong(one))?;
                    self.numbers.push((name.trim().into(), value.trim().replace('_', "")));
                }
            } else if *line == "mirror! {" {
                let body = body();
                let read = || {
                    let (head, fields) = body.trim_end_matches([' ', '}']).split_once('{')?;
                    let (attributes, names) = head.split_once("struct ")?;
                    let (rust, cpp) = names.split_once('=')?;
                    let align = attributes.split_once("align(").map_or(Some("1"), |(_, rest)| {
                        rest.split_once(')').map(|(align, _)| align)
                    });
                    let fields = fields.split_terminator(", ").map(|field| {
                        let (name, of) = field.trim().trim_end_matches(',').split_once(": ")?;
                        Some((name.to_string(), of.to_string()))
                    });
                    Some(Struct {
                        file: file.clone(),
                        rust: rust.trim().into(),
                        cpp: cpp.trim().into(),
                        align: align?.parse().ok()?,
                        fields: fields.collect::<Option<_>>()?,
                    })
                };
                self.structs.push(read().ok_or_else(|| wrong(&body))?);
            }
        }
        Ok(())
    }

    /// The size of a struct, and where its fields begin, by the rules of C.
    fn layout(&self, of: &Struct) -> Result<(Layout, Vec<usize>), String> {
        let mut whole = Layout { size: 0, align: of.align };
        let mut offsets = Vec::new();
        for (_, field) in &of.fields {
            let field = self.layout_of_type(field, &of.file)?;
            let offset = whole.size.next_multiple_of(field.align);
            offsets.push(offset);
            whole = Layout { size: offset + field.size, align: whole.align.max(field.align) };
        }
        whole.size = whole.size.next_multiple_of(whole.align);
        Ok((whole, offsets))
    }

    /// The layout of a type that a field in `file` has.
    fn layout_of_type(&self, of: &str, file: &Path) -> Result<Layout, String> {
        let scalar = |size| Ok(Layout { size, align: size });
        if of.starts_with('*') {
            return scalar(8);
        }
        let array = of.strip_prefix('[').and_then(|of| of.strip_suffix(']')?.split_once("; "));
        if let Some((element, count)) = array {
            let element = self.layout_of_type(element, file)?;
            let count: usize = count.parse().map_err(|_| format!("src: no length in {of}"))?;
            return Ok(Layout { size: element.size * count, ..element });
        }
        match of {
            "u8" => return scalar(1),
            "u32" | "i32" | "f32" | "c_uint" => return scalar(4),
            "u64" | "i64" | "f64" => return scalar(8),
            _ => {}
        }
        // A struct of this file, of the module that its path names, or the only one of the name.
        let (module, name) =
            of.strip_prefix("crate::").unwrap_or(of).rsplit_once("::").unwrap_or(("", of));
        let named = || self.structs.iter().filter(|one| one.rust == name);
        let is_of_module = |one: &&Struct| one.file.with_extension("").starts_with(module);
        let here = named().find(|one| module.is_empty() && one.file == file);
        let found = here.or_else(|| named().find(is_of_module));
        let found = found.ok_or_else(|| format!("src/{}: no mirror of {of}", file.display()))?;
        Ok(self.layout(found)?.0)
    }
}

fn flags() -> Result<Vec<String>, String> {
    let chosen = std::env::var("XENTILE_CUDA_ARCHS").ok();
    let mut flags: Vec<String> = ["--fatbin", "-std=c++17", "-O3", "--threads", "2"]
        .into_iter()
        .chain(["-Xfatbin", "-compress-all"])
        .map(Into::into)
        .collect();
    for architecture in chosen.as_deref().unwrap_or(ARCHITECTURES).split(',') {
        if !architecture.starts_with(|first: char| first.is_ascii_digit()) {
            return Err(format!(
                "XENTILE_CUDA_ARCHS names the architecture `{architecture}`; some of \
                 {ARCHITECTURES} would be right, with commas between"
            ));
        }
        flags.push(format!("-gencode=arch=compute_{architecture},code=sm_{architecture}"));
    }
    if chosen.is_none() {
        // A minute more of compressing takes a third off a release's wheel, of which an index takes 25 MiB.
        flags.extend([PTX, "--compress-mode=size"].map(Into::into));
    }
    match std::env::var("XENTILE_CUDA_FAST_COMPILE").as_deref() {
        Err(_) | Ok("" | "0") => {}
        Ok("1") => {
            flags.extend(["--Ofast-compile=max".into(), format!("-Xptxas=--entry={ASSEMBLED}")]);
        }
        Ok(other) => {
            return Err(format!("XENTILE_CUDA_FAST_COMPILE is `{other}`; it must be 0 or 1"));
        }
    }
    Ok(flags)
}

fn find_nvcc(package: &Path) -> Result<PathBuf, String> {
    if let Some(nvcc) = std::env::var_os("XENTILE_NVCC") {
        let nvcc = PathBuf::from(nvcc);
        return if nvcc.is_file() {
            Ok(nvcc)
        } else {
            Err(format!("XENTILE_NVCC is {}, which is no file; it must be nvcc", nvcc.display()))
        };
    }
    let home = std::env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = home.into_iter().chain(std::env::split_paths(&path));
    let mut found = folders.map(|folder| folder.join("nvcc")).find(|nvcc| nvcc.is_file());
    if found.is_none() {
        found = wheels(package);
    }
    found.ok_or_else(|| {
        format!(
            "no CUDA compiler: nvcc is not at XENTILE_NVCC, in CUDA_HOME/bin, in PATH or among the \
             wheels of .venv; this installs one there: {INSTALL}"
        )
    })
}

/// The compiler that wheels put into the virtual environment at the root of the workspace.
fn wheels(package: &Path) -> Option<PathBuf> {
    let inside = |folder: PathBuf, prefix: &str| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut found: Vec<_> = entries
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
            .map(|entry| entry.path())
            .collect();
        found.sort();
        found
    };
    let environment = package.ancestors().nth(2)?.join(".venv/lib");
    inside(environment, "python")
        .into_iter()
        .flat_map(|python| inside(python.join("site-packages/nvidia"), "cu"))
        .map(|wheel| wheel.join("bin/nvcc"))
        .rfind(|nvcc| nvcc.is_file())
}

/// 13000 for "release 13.0".
fn version_number(text: &str) -> Option<u32> {
    let (_, release) = text.split_once("release ")?;
    let (major, rest) = release.split_once('.')?;
    let minor = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    Some(major.parse::<u32>().ok()? * 1000 + minor.parse::<u32>().ok()? * 10)
}

/// The files of a folder, in order.
fn files(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    Ok(files)
}

fn variable(name: &str) -> Result<String, String> {
    std::env::var(name).map_err(|error| format!("{name}: {error}"))
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

fn copy(from: &Path, to: &Path) -> Result<(), String> {
    let copied = fs::copy(from, to).map(drop);
    copied.map_err(|error| format!("{} to {}: {error}", from.display(), to.display()))
}

/// What a command that succeeds prints.
fn output(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    let [said, warned] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    if output.status.success() {
        Ok(format!("{said}{warned}"))
    } else {
        eprintln!("{said}{warned}");
        Err(format!("{command:?} failed, {}: see its own words above", output.status))
    }
}
