//! Platforms by their names, and where their plug-ins are looked for.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{Error, Platform, Result};

impl Platform {
    /// Where packages put it, from site-packages: files, and directories that hold it.
    const fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Cpu => &["xla_plugins/xla_cpu_pjrt"],
            Self::Cuda => &["jax_plugins/xla_cuda13", "jax_plugins/xla_cuda12"],
            Self::Tpu => &["libtpu/libtpu.so"],
        }
    }

    /// The plug-in's file: the one that the environment variable names, else that of the active
    /// Python environment, which is `VIRTUAL_ENV` or what `python3` reports.
    ///
    /// # Errors
    /// There is none, and the error names every place looked in; or the variable names no file.
    pub fn locate(self) -> Result<PathBuf> {
        self.locate_in(std::env::var_os(self.variable()), python)
    }

    fn locate_in(
        self,
        variable: Option<OsString>,
        python: impl FnOnce() -> Python,
    ) -> Result<PathBuf> {
        let name = self.variable();
        let mut tried = Vec::new();
        match variable.filter(|value| !value.is_empty()).map(PathBuf::from) {
            Some(path) if path.is_file() => return Ok(path),
            Some(path) => {
                return Err(Error::Open {
                    reason: format!("{name} names it, and there is no such file"),
                    path,
                });
            }
            None => tried.push(format!("the environment variable {name}: not set")),
        }
        let Python { source, packages } = python();
        if packages.is_empty() {
            tried.push(source);
        }
        for directory in packages {
            for package in self.packages() {
                let place = directory.join(package);
                match library(&place) {
                    Some(path) => return Ok(path),
                    None => tried.push(place.display().to_string()),
                }
            }
        }
        Err(Error::NotFound { platform: self, tried })
    }
}

impl std::str::FromStr for Platform {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.iter().copied().find(|platform| platform.name() == name).ok_or_else(|| {
            Error::Arguments(format!("no platform {name:?}: choose from cpu, cuda, tpu"))
        })
    }
}

/// The file `place`, or the first shared library in it.
fn library(place: &Path) -> Option<PathBuf> {
    if place.is_file() {
        return Some(place.into());
    }
    let mut files: Vec<_> = std::fs::read_dir(place)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|suffix| suffix == "so"))
        .collect();
    files.sort();
    files.into_iter().next()
}

/// The site-packages of a Python environment, and how it was found.
struct Python {
    source: String,
    packages: Vec<PathBuf>,
}

/// The active environment.
fn python() -> Python {
    match std::env::var_os("VIRTUAL_ENV").filter(|value| !value.is_empty()) {
        Some(root) => environment(Path::new(&root)),
        None => interpreter(),
    }
}

fn environment(root: &Path) -> Python {
    let mut packages: Vec<_> = std::fs::read_dir(root.join("lib"))
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path().join("site-packages")))
        .filter(|path| path.is_dir())
        .collect();
    packages.sort();
    Python {
        source: format!("VIRTUAL_ENV, {}: no lib/*/site-packages there", root.display()),
        packages,
    }
}

fn interpreter() -> Python {
    const SCRIPT: &str = "import site, sysconfig; print('\\n'.join(dict.fromkeys([\
        sysconfig.get_path('purelib'), sysconfig.get_path('platlib'), \
        *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []), \
        *site.getsitepackages()])))";
    let output = match Command::new("python3").args(["-c", SCRIPT]).output() {
        Ok(output) if output.status.success() => output.stdout,
        Ok(output) => {
            return Python { source: format!("python3: {}", output.status), packages: vec![] };
        }
        Err(error) => return Python { source: format!("python3: {error}"), packages: vec![] },
    };
    Python {
        source: "python3: it reports no site-packages".into(),
        packages: String::from_utf8_lossy(&output)
            .lines()
            .filter(|line| !line.is_empty())
            .map(PathBuf::from)
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nowhere() -> Python {
        Python { source: "python3: not there".into(), packages: vec![] }
    }

    #[test]
    fn the_variable_comes_first_and_must_name_a_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("plugin.so");
        let locate = || Platform::Cpu.locate_in(Some(file.clone().into()), nowhere);
        let error = locate().unwrap_err().to_string();
        assert!(
            error.contains("plugin.so") && error.contains("XENTILE_PJRT_CPU names it"),
            "{error}"
        );
        std::fs::write(&file, "").unwrap();
        assert_eq!(locate().unwrap(), file);
    }

    #[test]
    fn python_environments_are_searched_in_order() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        for package in ["xla_cuda12", "xla_cuda13"] {
            let place = root.join("lib/python3.12/site-packages/jax_plugins").join(package);
            std::fs::create_dir_all(&place).unwrap();
            std::fs::write(place.join("__init__.py"), "").unwrap();
            std::fs::write(place.join("xla_cuda_plugin.so"), "").unwrap();
        }
        let locate = |platform: Platform| platform.locate_in(None, || environment(root));
        let found = locate(Platform::Cuda).unwrap();
        assert!(found.ends_with("xla_cuda13/xla_cuda_plugin.so"), "{}", found.display());

        let error = locate(Platform::Tpu).unwrap_err();
        assert!(matches!(&error, Error::NotFound { tried, .. } if tried.len() == 2), "{error:?}");
    }

    #[test]
    fn an_error_says_everywhere_it_looked_and_what_to_install() {
        for &platform in Platform::ALL {
            let error = platform.locate_in(None, nowhere).unwrap_err().to_string();
            for part in
                [platform.variable(), platform.install(), "python3: not there", platform.name()]
            {
                assert!(error.contains(part), "{part} in: {error}");
            }
            let places = format!("{}: not set, python3: not there; install", platform.variable());
            assert!(error.contains(&places) && !error.contains('\n'), "{error}");
            assert_eq!(platform.to_string().parse::<Platform>().unwrap(), platform);
        }
        assert!("gpu".parse::<Platform>().unwrap_err().to_string().contains("cpu, cuda, tpu"));
    }
}
