//! The PJRT plug-ins of this machine, as text for people.

use std::fmt::Write;
use std::path::Path;

use pjrt_client::{Client, Platform, Plugin};

use crate::memory;

/// Describes the plug-in at `path`, else one a platform that is found, and says whether there is any.
#[must_use]
pub fn describe(path: Option<&Path>) -> (String, bool) {
    let mut text = String::new();
    let mut any = false;
    let plugins: Vec<_> = match path {
        Some(path) => vec![(path.display().to_string(), Plugin::open(path))],
        None => Platform::ALL
            .iter()
            .map(|&platform| (format!("xla:{}", platform.name()), Plugin::find(platform, None)))
            .collect(),
    };
    for (name, plugin) in plugins {
        match plugin {
            Ok(plugin) => {
                any = true;
                one(&mut text, &name, plugin);
            }
            Err(error) => _ = writeln!(text, "{name}\n  {}", indented(&error.to_string())),
        }
    }
    (text, any)
}

fn one(text: &mut String, name: &str, plugin: Plugin) {
    _ = writeln!(text, "{name}");
    let mut line = |key: &str, value: String| _ = writeln!(text, "  {key:<12}{}", indented(&value));
    // What follows is questions to a plug-in, each of which it may fail to answer.
    let or_error =
        |answer: pjrt_client::Result<String>| answer.unwrap_or_else(|error| error.to_string());
    line("plug-in", plugin.path().display().to_string());
    line("PJRT", plugin.version().to_string());
    let attributes = plugin.attributes().map(|attributes| {
        let attributes = attributes.iter().map(|(name, value)| format!("{name} {value}"));
        attributes.collect::<Vec<_>>().join(", ")
    });
    line("attributes", or_error(attributes));
    let extensions: Vec<_> =
        plugin.extensions().map(|extension| format!("{extension:?}")).collect();
    line("extensions", extensions.join(", "));
    match plugin.client(&[]) {
        Err(error) => line("devices", error.to_string()),
        Ok(client) => {
            line("platform", or_error(client.platform_name()));
            line("version", or_error(client.platform_version()));
            devices(&client, &mut line);
        }
    }
}

fn devices(client: &Client, line: &mut impl FnMut(&str, String)) {
    let devices = match client.addressable_devices() {
        Ok(devices) => devices,
        Err(error) => return line("devices", error.to_string()),
    };
    for device in devices {
        let kind = device.kind().unwrap_or_else(|error| error.to_string());
        let id = device.id().map_or_else(|error| error.to_string(), |id| id.to_string());
        let memory = match device.memory_stats() {
            Ok(stats) => {
                let known = stats.iter().filter_map(|(name, value)| Some((name, value?)));
                let known = known.map(|(name, value)| match name {
                    "num_allocs" => format!("{name} {value}"),
                    _ => format!("{name} {}", memory::human(value)),
                });
                known.collect::<Vec<_>>().join(", ")
            }
            Err(_) => "memory not reported".into(),
        };
        line(&format!("device {id}"), format!("{kind}: {memory}"));
    }
}

fn indented(text: &str) -> String {
    text.replace('\n', "\n              ")
}
