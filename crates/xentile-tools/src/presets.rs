//! The configs that come with the tools: those of configs/, by name.

use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;

/// The tool, the name and the text of each, from build.rs.
const PRESETS: &[(&str, &str, &str)] = include!(concat!(env!("OUT_DIR"), "/presets.rs"));

/// What the path of a preset starts with, where a config's path is asked for.
const PREFIX: &str = "preset:";

/// The names of a tool's presets.
pub fn names(tool: &str) -> impl Iterator<Item = &'static str> {
    PRESETS.iter().filter(move |preset| preset.0 == tool).map(|preset| preset.1)
}

/// Takes the name of one of a tool's presets.
#[must_use]
pub fn parser(tool: &str) -> PossibleValuesParser {
    PossibleValuesParser::new(names(tool))
}

/// The path of the config that was named, or of the preset.
#[must_use]
pub fn choose(tool: &str, config: Option<&Path>, preset: Option<&str>) -> Option<PathBuf> {
    let of_preset = |name| PathBuf::from(format!("{PREFIX}{tool}/{name}.yaml"));
    config.map(Path::to_path_buf).or_else(|| preset.map(of_preset))
}

/// The text of the preset at `path`; none where that is the path of a file.
pub(crate) fn text(path: &Path) -> Option<&'static str> {
    let (tool, name) =
        path.to_str()?.strip_prefix(PREFIX)?.strip_suffix(".yaml")?.split_once('/')?;
    PRESETS.iter().find(|preset| (preset.0, preset.1) == (tool, name)).map(|preset| preset.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preset_is_the_config_of_its_name() {
        let path = choose("gradcheck", None, Some("qwen_151643")).unwrap();
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/gradcheck/qwen_151643.yaml");
        assert_eq!(crate::config::read(&path).unwrap(), std::fs::read_to_string(file).unwrap());
        assert!(names("microbench").any(|name| name == "rms_norm_cpu"));
        assert!(names("sweep").any(|name| name == "quick"));
        assert_eq!(text(Path::new("configs/gradcheck/qwen_151643.yaml")), None);
    }
}
