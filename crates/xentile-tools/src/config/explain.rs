//! What is wrong with a key or a value, in words of a config.

/// Keys that had another name: the old one, the new one.
const RENAMED: [(&str, &str); 1] = [("scale", "std")];

/// Rewords serde's message about the value at `path`, adding the nearest key where one is unknown:
/// among those that serde knows, and `more`.
pub(super) fn explain(path: &str, message: &str, more: &[&str]) -> anyhow::Error {
    for kind in ["field", "variant"] {
        let Some(rest) = message.strip_prefix(&format!("unknown {kind} ")) else { continue };
        // serde quotes first what it met, then what it knows.
        let mut quoted = rest.split('`').skip(1).step_by(2);
        let Some(met) = quoted.next() else { continue };
        let mut known: Vec<_> = quoted.collect();
        let path = path.trim_start_matches("?.");
        let what = match kind {
            "field" => format!("unknown key `{path}`"),
            _ => format!("unknown value `{met}` for `{path}`"),
        };
        // Those are beside keys that are read here alone.
        if kind == "field" && matches!(path.trim_end_matches(met), "" | "cell.") {
            known.extend(more);
        }
        let renamed = |(old, new): &&(&str, &str)| *old == met && known.contains(new);
        if let Some((_, new)) = RENAMED.iter().find(renamed) {
            return anyhow::anyhow!("{what}; it is called `{new}` now");
        }
        let near = |name: &&&str| strsim::damerau_levenshtein(name, met);
        let hint = match known.iter().min_by_key(near) {
            Some(name) if near(&name) <= 1 + met.len() / 3 => format!("did you mean `{name}`?"),
            _ => format!("the choices are {}", known.join(", ")),
        };
        return anyhow::anyhow!("{what}; {hint}");
    }
    match path {
        "." | "?" => anyhow::anyhow!("{message}"),
        _ => anyhow::anyhow!("`{path}`: {message}"),
    }
}
