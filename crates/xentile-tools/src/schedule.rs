//! The schedule that the TPU's compiler made, from the text that libtpu dumps.
//!
//! A TPU core runs bundles, one a cycle where nothing stalls, and each bundle has slots for each unit.
//! The compiler writes two files for each computation (the top-level program, every fusion, every
//! kernel): how many bundles it has, and a table with a row a bundle of the slots that are used.
//! Each bundle is written once, however often the program comes by: a loop's body counts once, and
//! how many bundles run is read from the listing of them, as far as it tells.

mod trip_counts;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;

/// What libtpu reads when it is initialised: arguments with blanks between them.
pub const INIT_ARGS: &str = "LIBTPU_INIT_ARGS";

/// A program's schedule, and that of each of its computations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Schedule {
    /// Bundles of all computations.
    pub bundles: u64,
    /// Those of them that hold no instruction.
    pub empty_bundles: u64,
    /// What a bundle has, by unit.
    pub slots_per_bundle: BTreeMap<String, u64>,
    /// What is used of it in all bundles, by unit. `vload_fill` and `vstore_spill` are the parts of
    /// `vload` and `vstore` that move registers from and to memory for want of registers.
    pub slots_used: BTreeMap<String, u64>,
    /// The parts, by descending number of bundles. `TLP` is the top-level program, which starts the
    /// others.
    pub computations: Vec<Computation>,
}

/// A part of a program that has a schedule of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Computation {
    /// The compiler's name: of a fusion or custom call in its HLO, or of its own doing.
    pub name: String,
    /// Bundles.
    pub bundles: u64,
    /// Those of them that hold no instruction.
    pub empty_bundles: u64,
    /// Slots used in all bundles, by unit.
    pub slots_used: BTreeMap<String, u64>,
    /// Bundles that run, loops counted as often as they run; an estimate, without `data_bundles`.
    /// None where the listing is not as expected.
    pub run_bundles: Option<u64>,
    /// Bundles of one iteration of each loop whose end the data decide.
    pub data_bundles: Option<u64>,
    /// Steps of pipelined grids.
    pub grid_steps: Option<u64>,
    /// Bytes that copies between HBM and VMEM move; an estimate. None where the listing does not tell.
    pub dma_bytes: Option<u64>,
    /// What it holds of VMEM: scratch and the windows of a pipeline. None where that is not reported.
    pub vmem_bytes: Option<u64>,
}

impl Computation {
    /// Whether it is a copy of XLA's that transposes: the vector unit's lanes are crossed in no other.
    #[must_use]
    pub fn transposes(&self) -> bool {
        self.name.starts_with("copy") && self.slots_used.get("xlu").is_some_and(|&used| used > 0)
    }
}

/// libtpu's arguments that have it dump schedules to `folder`, after those of the user.
#[must_use]
pub fn init_args(user: &str, folder: &Path) -> String {
    let dumps = format!("{TO}{} {TEXT}=true", folder.display());
    if user.trim().is_empty() { dumps } else { format!("{user} {dumps}") }
}

const TO: &str = "--xla_jf_dump_to=";
const TEXT: &str = "--xla_jf_dump_llo_text";

/// Where libtpu dumps schedules with these arguments; none where it does not. Of an argument that is
/// there twice the last counts.
#[must_use]
pub fn folder(init_args: &str) -> Option<PathBuf> {
    let arguments = || init_args.split_whitespace().rev();
    let text = arguments().find_map(|argument| argument.strip_prefix(TEXT))?;
    let folder = arguments().find_map(|argument| argument.strip_prefix(TO))?;
    (matches!(text, "" | "=true" | "=1") && !folder.is_empty()).then(|| folder.into())
}

/// A folder that libtpu dumps to, before the compilation whose schedule is wanted.
pub(crate) struct Dump {
    folder: PathBuf,
    before: Vec<PathBuf>,
}

impl Dump {
    /// The folder as it is now; none where libtpu dumps nothing.
    pub(crate) fn from_environment() -> Option<Self> {
        let folder = folder(&std::env::var(INIT_ARGS).ok()?)?;
        let before = files(&folder).unwrap_or_default();
        Some(Self { folder, before })
    }

    /// The schedule of what was compiled since.
    ///
    /// # Errors
    /// Nothing was dumped, or what was is not in the format known here: the file and line.
    pub(crate) fn read(&self) -> Result<Schedule> {
        let new = files(&self.folder)
            .with_context(|| format!("cannot read {}", self.folder.display()))?
            .into_iter()
            .filter(|path| !self.before.contains(path));
        read(new).with_context(|| format!("the schedule in {}", self.folder.display()))
    }
}

/// The schedule of everything that libtpu dumped to `folder`.
///
/// # Errors
/// The folder cannot be read, or what is in it is not in the format known here.
pub fn read_folder(folder: &Path) -> Result<Schedule> {
    read(files(folder).with_context(|| format!("cannot read {}", folder.display()))?.into_iter())
}

fn files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
}

/// Which of a computation's files one is.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Bundles,
    Slots,
    Listing,
    Allocations,
}

/// What the files of a computation hold.
#[derive(Default)]
struct Files {
    bundles: Option<[u64; 2]>,
    slots: Option<Slots>,
    trips: Option<trip_counts::TripCounts>,
    vmem_bytes: Option<u64>,
}

/// Takes `<time>-<computation>-<pass>-<kind>.txt` apart, into what is the computation's own and what
/// the file holds; none for other files.
fn take_apart(name: &str) -> Option<(&str, Kind)> {
    let (rest, kind) = [
        ("-schedule-analysis_final_bundles.txt", Kind::Bundles),
        ("-final_hlo-static-per-bundle-utilization.txt", Kind::Slots),
        ("-final_bundles.txt", Kind::Listing),
        ("-original.txt", Kind::Allocations),
    ]
    .iter()
    .find_map(|&(suffix, kind)| Some((name.strip_suffix(suffix)?, kind)))?;
    let (computation, pass) = rest.rsplit_once('-')?;
    pass.bytes().all(|byte| byte.is_ascii_digit()).then_some((computation, kind))
}

fn read(paths: impl Iterator<Item = PathBuf>) -> Result<Schedule> {
    let mut found: BTreeMap<String, Files> = BTreeMap::new();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some((computation, kind)) = take_apart(&name) else { continue };
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let entry = found.entry(computation.to_owned()).or_default();
        match kind {
            // What allocates memory and does nothing has an analysis of nothing.
            Kind::Bundles if text.is_empty() => entry.bundles = Some([0; 2]),
            Kind::Bundles => entry.bundles = Some(bundles(&text).context(name)?),
            Kind::Slots => entry.slots = Some(slots(&text).context(name)?),
            Kind::Listing => entry.trips = trip_counts::read(&text),
            Kind::Allocations => entry.vmem_bytes = vmem_bytes(&text),
        }
    }
    ensure!(!found.is_empty(), "libtpu dumped none; it may be of a version that does not");
    let mut schedule = Schedule::default();
    for (key, Files { bundles, slots, trips, vmem_bytes }) in found {
        if bundles.is_none() && slots.is_none() || bundles == Some([0; 2]) {
            continue;
        }
        let (Some([bundles, empty_bundles]), Some(slots)) = (bundles, slots) else {
            bail!("{key} has one of two files; a version of libtpu that writes both is needed");
        };
        let rows = slots.rows;
        ensure!(rows == bundles, "{key} has {bundles} bundles and a table of {rows} rows");
        schedule.bundles += bundles;
        schedule.empty_bundles += empty_bundles;
        for (unit, used) in &slots.used {
            *schedule.slots_used.entry(unit.clone()).or_default() += used;
        }
        schedule.slots_per_bundle.extend(slots.per_bundle);
        // Before the name is the time.
        let name = key.split_once('-').map_or(key.as_str(), |(_, name)| name).to_owned();
        let slots_used = slots.used;
        // A listing of as many bundles, or it was misread.
        let trips = trips.filter(|trips| trips.of_bundles.len() as u64 == bundles);
        let run = trips.as_ref().map(|trips| trips.of_bundles.iter().sum::<f64>());
        schedule.computations.push(Computation {
            name,
            bundles,
            empty_bundles,
            slots_used,
            run_bundles: run.map(|run| run.round() as u64),
            data_bundles: trips.as_ref().map(|trips| trips.data_bundles),
            grid_steps: trips.as_ref().map(|trips| trips.steps.round() as u64),
            dma_bytes: trips.and_then(|trips| trips.dma_bytes).map(|bytes| bytes.round() as u64),
            vmem_bytes,
        });
    }
    schedule.computations.sort_by_key(|computation| std::cmp::Reverse(computation.bundles));
    Ok(schedule)
}

/// The sum of `size = 0x..` over allocations in VMEM; none where there is no allocation at all.
fn vmem_bytes(text: &str) -> Option<u64> {
    let allocations = || text.lines().filter(|line| line.trim_start().starts_with("#allocation"));
    allocations().next()?;
    let size = |line: &str| {
        let (_, rest) = line.split_once("space=vmem, size = 0x")?;
        let end = rest.find(|c: char| !c.is_ascii_hexdigit())?;
        // One that is not reported is -1.
        u64::from_str_radix(&rest[..end], 16).ok().filter(|&size| size <= u64::from(u32::MAX))
    };
    Some(allocations().filter_map(size).sum())
}

/// All bundles, and those that are empty.
fn bundles(text: &str) -> Result<[u64; 2]> {
    let count = |name: &str| -> Result<u64> {
        for (line, text) in text.lines().enumerate() {
            let Some(count) = text.trim_start().strip_prefix(name) else { continue };
            return count.trim().parse().with_context(|| {
                format!("line {}: {:?} is no number of bundles", line + 1, count.trim())
            });
        }
        bail!("line {}: the file ends without {name:?}", text.lines().count());
    };
    Ok([count("total scheduled bundles:")?, count("empty scheduled bundles:")?])
}

#[derive(Debug)]
struct Slots {
    rows: u64,
    per_bundle: BTreeMap<String, u64>,
    used: BTreeMap<String, u64>,
}

/// The table of slots: a heading, the units, their slots, another heading, and a row a bundle.
fn slots(text: &str) -> Result<Slots> {
    let mut lines = text.lines().enumerate();
    let mut next = |what: &str| {
        let (line, text) = lines.next().with_context(|| format!("the file ends before {what}"))?;
        Ok::<_, anyhow::Error>((line + 1, text))
    };
    // The compiler spells it CAPACTIY.
    let (line, heading) = next("the heading of the units")?;
    ensure!(heading.starts_with("== CAPAC"), "line {line}: {heading:?} is no heading of units");
    let (_, units) = next("the units")?;
    let units: Vec<_> =
        units.split(',').map(|unit| unit.trim().to_ascii_lowercase().replace(':', "_")).collect();
    let row = |line: usize, text: &str| -> Result<Vec<u64>> {
        let row: Result<Vec<_>, _> = text.split_whitespace().map(str::parse).collect();
        let row = row.with_context(|| format!("line {line}: {text:?} is no row of slots"))?;
        ensure!(
            row.len() == units.len(),
            "line {line}: {} slots, and there are {} units",
            row.len(),
            units.len()
        );
        Ok(row)
    };
    let (line, text) = next("the units' slots")?;
    let per_bundle = units.iter().cloned().zip(row(line, text)?).collect();
    let (line, heading) = next("the heading of the bundles")?;
    ensure!(
        heading.starts_with("== UTILIZATION"),
        "line {line}: {heading:?} is no heading of bundles"
    );
    let mut rows = 0;
    let mut used = vec![0; units.len()];
    for (line, text) in lines {
        if text.trim().is_empty() {
            continue;
        }
        rows += 1;
        for (sum, slots) in used.iter_mut().zip(row(line + 1, text)?) {
            *sum += slots;
        }
    }
    Ok(Slots { rows, per_bundle, used: units.into_iter().zip(used).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUNDLES: &str = "\
Schedule analysis:
\ttotal scheduled bundles:    3
\tempty scheduled bundles:    1
\tnon empty scheduled bundles: 2
\t   2.00 scheduled bundles (100.00%): %double.1 = f32[8]{0} fusion(%x), kind=kLoop
\t[opcode]       2 scheduled bundles (100.00%): fusion               (1 instances,   2.00 avg)";
    const SLOTS: &str = "\
== CAPACTIY:
MATMUL, VALU, VLOAD, VLOAD:FILL
    2     4     3     3
== UTILIZATION:
0 1 1 0
0 0 0 0
0 4 2 1
";

    #[test]
    fn both_files_make_a_schedule() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("12-old-2-schedule-analysis_final_bundles.txt", "no schedule");
        let dump = Dump { folder: folder.path().into(), before: files(folder.path()).unwrap() };
        let error = format!("{:#}", dump.read().unwrap_err());
        assert!(error.contains("libtpu dumped none"), "{error}");
        for (name, bundles) in [("17-TLP-70", "3"), ("18-double-3.1-9", "5")] {
            let text = BUNDLES.replacen("    3", bundles, 1);
            write(&format!("{name}-schedule-analysis_final_bundles.txt"), &text);
            let slots = SLOTS.to_owned() + if bundles == "5" { "0 0 0 0\n0 0 1 0\n" } else { "" };
            write(&format!("{name}-final_hlo-static-per-bundle-utilization.txt"), &slots);
        }
        // As libtpu has it of a buffer that is allocated.
        write("19-custom-call.1-9-schedule-analysis_final_bundles.txt", "");
        let nothing = SLOTS.replace("0 1 1 0\n0 0 0 0\n0 4 2 1\n", "0 0 0 0\n");
        write("19-custom-call.1-9-final_hlo-static-per-bundle-utilization.txt", &nothing);
        write("17-TLP-68-schedule-analysis_packed-bundles-post-ra.txt", "another pass");
        write("17-TLP-69-pre-delay_hlo-static-per-bundle-utilization.txt", "another pass");
        let schedule = dump.read().unwrap();
        assert_eq!((schedule.bundles, schedule.empty_bundles), (8, 2));
        assert_eq!(schedule.slots_per_bundle["matmul"], 2);
        let used: Vec<_> =
            schedule.slots_used.iter().map(|(unit, &used)| (unit.as_str(), used)).collect();
        assert_eq!(used, [("matmul", 0), ("valu", 10), ("vload", 7), ("vload_fill", 2)]);
        let names: Vec<_> =
            schedule.computations.iter().map(|part| (part.name.as_str(), part.bundles)).collect();
        assert_eq!(names, [("double-3.1", 5), ("TLP", 3)]);

        write("17-TLP-70-schedule-analysis_final_bundles.txt", &BUNDLES.replace("    3", "4"));
        let error = format!("{:#}", dump.read().unwrap_err());
        assert!(error.contains("17-TLP has 4 bundles and a table of 3 rows"), "{error}");
        fs::remove_file(folder.path().join("17-TLP-70-schedule-analysis_final_bundles.txt"))
            .unwrap();
        let error = format!("{:#}", dump.read().unwrap_err());
        assert!(error.contains("17-TLP has one of two files"), "{error}");
        write("17-TLP-70-schedule-analysis_final_bundles.txt", "a new format");
        let error = format!("{:#}", dump.read().unwrap_err());
        let expected =
            "17-TLP-70-schedule-analysis_final_bundles.txt: line 1: the file ends without";
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn another_format_is_named_by_its_line() {
        let error = |text: &str| format!("{:#}", slots(text).unwrap_err());
        assert_eq!(error(""), "the file ends before the heading of the units");
        assert!(error("x\n").contains("line 1: \"x\" is no heading of units"));
        let edit = |from: &str, to: &str| error(&SLOTS.replace(from, to));
        assert!(edit("== UTILIZATION", "busy").contains("line 4: \"busy:\" is no heading"));
        assert!(edit("0 4 2 1", "0 4 2").contains("line 7: 3 slots, and there are 4 units"));
        assert!(edit("0 4 2 1", "0 4 two 1").contains("line 7: \"0 4 two 1\" is no row of slots"));
        let text = BUNDLES.replace("bundles:    3", "bundles: three");
        let error = format!("{:#}", bundles(&text).unwrap_err());
        assert!(error.starts_with("line 2: \"three\" is no number of bundles"), "{error}");
    }

    #[test]
    fn xla_flags_of_the_user_are_kept() {
        let args = init_args(" --a=1 --xla_jf_dump_to=/u", Path::new("/d"));
        assert_eq!(
            args,
            " --a=1 --xla_jf_dump_to=/u --xla_jf_dump_to=/d --xla_jf_dump_llo_text=true"
        );
        assert_eq!(folder(&args).unwrap(), Path::new("/d"));
        assert_eq!(folder(&init_args("", Path::new("/d"))).unwrap(), Path::new("/d"));
        assert_eq!(folder("--xla_jf_dump_to=/d"), None);
        assert_eq!(folder("--xla_jf_dump_to=/d --xla_jf_dump_llo_text=false"), None);
    }
}
