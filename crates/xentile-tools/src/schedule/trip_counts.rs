//! How often each bundle of a computation runs, as far as the compiler's listing of them tells.
//!
//! The listing marks where loops begin, names the branches that go back there, and has most loops
//! counted by a comparison with a constant. What it does not tell is kept apart: loops whose trip
//! counts depend on data. A branch that leaves code out is taken to be decided by the data too, and the
//! code to run, unless it asks for the first or the last iteration of a loop around it.

use std::collections::BTreeMap;

/// Bundles after a branch that run before it takes effect, on every TPU from v5e on.
const DELAY_SLOTS: usize = 4;

/// What is known of how often bundles run.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TripCounts {
    /// Times that each bundle runs; 0 in loops that the data end.
    pub(super) of_bundles: Vec<f64>,
    /// Bundles of one iteration of every loop that the data end.
    pub(super) data_bundles: u64,
    /// Steps of pipelined grids.
    pub(super) steps: f64,
    /// Bytes that copies between HBM and VMEM move. One whose size is in a register counts as the
    /// largest whose size the listing has: it is a block that may be ragged. None where the listing has
    /// the size of no copy.
    pub(super) dma_bytes: Option<f64>,
}

struct Bundle<'a> {
    begins_loop: bool,
    text: &'a str,
}

/// A loop that a branch closes: bundles from `first` to `last`.
struct Loop {
    first: usize,
    last: usize,
    /// None where the data end it.
    trips: Option<f64>,
}

/// What a predicate compares.
#[derive(Clone, Copy)]
struct Comparison<'a> {
    operation: &'a str,
    register: &'a str,
    /// A constant or a register.
    with: &'a str,
}

/// Reads a listing; none where it is not in the format known here.
pub(super) fn read(listing: &str) -> Option<TripCounts> {
    let bundles = bundles(listing);
    if bundles.is_empty() {
        return None;
    }
    let predicates = predicates(listing);
    let selects = selects(listing);
    let starts = starts(&bundles);
    let mut loops = Vec::new();
    let mut steps = 0.0;
    for (first, _) in bundles.iter().enumerate().filter(|(_, bundle)| bundle.begins_loop) {
        let back = (first..bundles.len()).rev().find_map(|index| {
            branches(bundles[index].text)
                .find(|&(_, region)| starts.get(region) == Some(&first))
                .map(|(predicate, _)| (index, predicate))
        });
        // One that ends at once runs once.
        let Some((branch, predicate)) = back else { continue };
        let last = (branch + DELAY_SLOTS).min(bundles.len() - 1);
        let exit = predicates.get(predicate.trim_start_matches('!'));
        let trips = exit.and_then(|exit| {
            let trips = number(exit.with).filter(|_| exit.operation == "ge")?;
            let stages = stages(&bundles[first..=last]);
            if stages > 0.0 {
                steps += trips - stages;
            }
            Some(trips - stages)
        });
        let selected = exit.and_then(|exit| selects.get(exit.with)).copied();
        loops.push((Loop { first, last, trips }, selected));
    }
    // A count that another register chooses: most often one number, and another in the last iteration
    // of a loop around it.
    let counted: Vec<f64> = loops.iter().filter_map(|(found, _)| found.trips).collect();
    for (found, selected) in &mut loops {
        let Some((predicate, yes, no)) = *selected else { continue };
        let (Some(yes), Some(no)) = (number(yes), number(no)) else { continue };
        let last = predicates.get(predicate).and_then(|asked| {
            let trips = number(asked.with)? + 1.0;
            (asked.operation == "eq" && counted.contains(&trips)).then_some(trips)
        });
        found.trips = Some(match last {
            Some(trips) => (yes + (trips - 1.0) * no) / trips,
            None => yes.max(no),
        });
    }
    let loops: Vec<Loop> = loops.into_iter().map(|(found, _)| found).collect();
    let around = |index: usize| {
        loops.iter().filter(move |found| (found.first..=found.last).contains(&index))
    };
    let mut of_bundles: Vec<f64> = (0..bundles.len())
        .map(|index| around(index).map(|found| found.trips.unwrap_or(0.0)).product())
        .collect();
    for (index, bundle) in bundles.iter().enumerate() {
        for (predicate, region) in branches(bundle.text) {
            let Some(&target) = starts.get(region).filter(|&&target| target > index) else {
                continue;
            };
            let (negated, name) = match predicate.strip_prefix('!') {
                Some(name) => (true, name),
                None => (false, predicate),
            };
            let Some(asked) = predicates.get(name) else { continue };
            if selects.contains_key(asked.register) {
                continue; // Another predicate, kept as a number.
            }
            let Some(with) = number(asked.with) else { continue };
            // Whether what is left out runs in the one iteration that is asked for, or in all others.
            let only = match (asked.operation, negated) {
                ("eq", true) | ("ne", false) => true,
                ("eq", false) | ("ne", true) => false,
                _ => continue,
            };
            let mut inner: Vec<&Loop> = around(index).collect();
            inner.sort_by_key(|found| std::cmp::Reverse(found.first));
            let trips = inner
                .iter()
                .filter_map(|found| found.trips)
                .find(|&trips| with == 0.0 || (trips - with - 1.0).abs() < 0.5);
            let Some(trips) = trips.filter(|&trips| trips > 1.0) else { continue };
            let share = if only { 1.0 / trips } else { 1.0 - 1.0 / trips };
            let from = (index + 1 + DELAY_SLOTS).min(target);
            for weight in &mut of_bundles[from..target] {
                *weight *= share;
            }
        }
    }
    let data: Vec<_> = loops.iter().filter(|found| found.trips.is_none()).collect();
    let is_data =
        |index: usize| data.iter().any(|found| (found.first..=found.last).contains(&index));
    let data_bundles = (0..bundles.len()).filter(|&index| is_data(index)).count() as u64;
    let dma_bytes = dma_bytes(&bundles, &of_bundles);
    Some(TripCounts { of_bundles, data_bundles, steps, dma_bytes })
}

/// Cuts a listing where lines begin with an address: `0x1f LB: >> { .. }`.
fn bundles(listing: &str) -> Vec<Bundle<'_>> {
    let mut heads = Vec::new();
    let mut at = 0;
    for line in listing.split_inclusive('\n') {
        let text = line.trim_start();
        let address = text.split_whitespace().next().unwrap_or_default();
        let hexadecimal = address.strip_prefix("0x").unwrap_or("");
        let is_address = address == "0"
            || (!hexadecimal.is_empty() && hexadecimal.bytes().all(|b| b.is_ascii_hexdigit()));
        let rest = text[address.len()..].trim_start();
        let mark = rest.split(':').next().unwrap_or_default().trim();
        let is_marked =
            mark.is_empty() || (mark.len() == 2 && mark.bytes().all(|b| b.is_ascii_uppercase()));
        if is_address && is_marked && rest.contains(':') {
            heads.push((at, mark == "LB"));
        }
        at += line.len();
    }
    let ends = heads.iter().skip(1).map(|head| head.0).chain([listing.len()]);
    heads
        .iter()
        .zip(ends)
        .map(|(&(start, begins_loop), end)| Bundle { begins_loop, text: &listing[start..end] })
        .collect()
}

/// The bundle in which each region of code starts.
fn starts<'a>(bundles: &[Bundle<'a>]) -> BTreeMap<&'a str, usize> {
    let mut starts = BTreeMap::new();
    for (index, bundle) in bundles.iter().enumerate() {
        for mark in ["Start region ", "Start/End empty region "] {
            for (at, _) in bundle.text.match_indices(mark) {
                starts.entry(digits(&bundle.text[at + mark.len()..])).or_insert(index);
            }
        }
    }
    starts
}

fn dma_bytes(bundles: &[Bundle], of_bundles: &[f64]) -> Option<f64> {
    const GRANULE: f64 = 32.0;
    let mut sizes = Vec::new();
    for (bundle, trips) in bundles.iter().zip(of_bundles) {
        for (at, _) in bundle.text.match_indices("dma.") {
            let Some((_, rest)) = bundle.text[at..].split_once("/*size_in_granules=*/") else {
                continue;
            };
            sizes.push((number(digits(rest)), trips));
        }
    }
    let largest = sizes.iter().filter_map(|size| size.0).reduce(f64::max);
    sizes.iter().map(|(size, trips)| Some(size.or(largest)? * GRANULE * *trips)).sum()
}

/// The branches of a bundle: their predicates, with `!` where negated, and the regions they go to.
fn branches(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.match_indices("sbr.rel (").filter_map(|(at, found)| {
        let (predicate, rest) = text[at + found.len()..].split_once(')')?;
        let rest = rest.trim_start().strip_prefix("target = $region")?;
        Some((predicate, digits(rest)))
    })
}

fn digits(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    &text[..end]
}

/// Predicates by name, `%p1 = scmp.ge.s32.totalorder %s1, 4`, some with a guard before the operands.
fn predicates(listing: &str) -> BTreeMap<&str, Comparison<'_>> {
    let mut found = BTreeMap::new();
    for (at, mark) in listing.match_indices(" = scmp.") {
        let Some(name) = listing[..at].rsplit(|c: char| !is_name(c)).next() else { continue };
        let rest = &listing[at + mark.len()..];
        let Some((operation, rest)) = rest.split_once(".s32.totalorder ") else { continue };
        let mut operands = rest.split(", ");
        let mut first = operands.next().unwrap_or_default();
        if first.starts_with('(') {
            first = operands.next().unwrap_or_default();
        }
        if !first.starts_with("%s") {
            continue;
        }
        let second = operands.next().unwrap_or_default();
        let with = second.split(|c: char| !is_name(c)).next().unwrap_or_default();
        found.insert(name, Comparison { operation, register: first, with });
    }
    found
}

/// Registers by name that are one of two values, with the predicate that chooses the first.
fn selects(listing: &str) -> BTreeMap<&str, (&str, &str, &str)> {
    let mut found = BTreeMap::new();
    for (at, mark) in listing.match_indices(" = scalar_select /*predicate=*/") {
        let Some(name) = listing[..at].rsplit(|c: char| !is_name(c)).next() else { continue };
        let rest = &listing[at + mark.len()..];
        let Some((predicate, rest)) = rest.split_once(", /*on_true=*/") else { continue };
        let Some((yes, rest)) = rest.split_once(", /*on_false=*/") else { continue };
        let no = rest.split(|c: char| !is_name(c)).next().unwrap_or_default();
        found.insert(name, (predicate, yes, no));
    }
    found
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '%'
}

fn number(text: &str) -> Option<f64> {
    text.parse::<u32>().ok().map(f64::from)
}

/// The iterations of a pipelined grid that only fetch the first step's blocks or store the last one's.
fn stages(bundles: &[Bundle]) -> f64 {
    const MARK: &str = "iteration index, stage = ";
    let texts = bundles.iter().map(|bundle| bundle.text);
    let found = texts.flat_map(|text| {
        text.match_indices(MARK).filter_map(|(at, _)| number(digits(&text[at + MARK.len()..])))
    });
    found.fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pipelined grid of 8 steps, a loop of 5 iterations in it, in this a loop of 3 but 1 in the
    /// last, code for the first step of the grid alone, and a loop over data.
    const LISTING: &str = "\
= control target key start
LB: loop body
= control target key end
     0   :  { %s1 = smov.u32 0 }
   0x1 LB: > { %s2 = sadd.s32 1, %s1 /* iteration index, stage = 0 */ } /* Start region 10 */
   0x2   : > { %p3 = scmp.ne.s32.totalorder %s2, 0 /* iteration index, stage = 2
second line of a comment */ }
   0x3   : > { %4 = sbr.rel (%p3) target = $region20 }
   0x4   : > {}
   0x5   : > {}
   0x6   : > {}
   0x7   : > {}
   0x8   : > { %5 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s9, /*size_in_granules=*/64 }
   0x9 LB: >> { %p6 = scmp.eq.s32.totalorder %s7, 4 } /* Start region 20 :: Start region 30 */
   0xa   : >> { %s8 = scalar_select /*predicate=*/%p6, /*on_true=*/1, /*on_false=*/3 }
   0xb LB: >>> { %p9 = scmp.ge.s32.totalorder (%p6), %s10, %s8 } /* Start region 40 */
   0xc   : >>> { %11 = sbr.rel (!%p9) target = $region40 }
   0xd   : >>> {}
   0xe   : >>> {}
   0xf   : >>> {}
  0x10   : >>> {}
  0x11   : >> { %p12 = scmp.ge.s32.totalorder %s7, 5 /* loop exit test */ }
  0x12   : >> { %13 = sbr.rel (!%p12) target = $region30 }
  0x13   : >> {}
  0x14   : >> {}
  0x15   : >> {}
  0x16   : >> {}
  0x17 LB: >> { %p14 = scmp.lt.s32.totalorder %s15, 0 } /* Start region 50 */
  0x18   : >> { %16 = sbr.rel (!%p14) target = $region50 }
  0x19   : >> {}
  0x1a   : >> {}
  0x1b   : >> {}
  0x1c   : >> {}
  0x1d   : > { %p17 = scmp.ge.s32.totalorder %s2, 10 /* loop exit test */ }
  0x1e   : > { %18 = sbr.rel (!%p17) target = $region10 ;;  %19 = dma.vmem_to_hbm [thread:$0]  /*vmem=*/%s9, /*size_in_granules=*/%s20 }
  0x1f   : > {}
  0x20   : > {}
  0x21   : > {}
  0x22   : > {}
  0x23   :  {}
";

    #[test]
    fn bundles_run_as_often_as_their_loops() {
        let trips = read(LISTING).unwrap();
        let expected: Vec<f64> = [
            (0..1, 1.0),
            (1..8, 8.0),
            (8..9, 1.0),
            (9..11, 40.0),
            // 3 + 3 + 3 + 3 + 1 iterations.
            (11..17, 8.0 * 13.0),
            (17..23, 40.0),
            (23..29, 0.0),
            (29..35, 8.0),
            (35..36, 1.0),
        ]
        .into_iter()
        .flat_map(|(bundles, trips): (std::ops::Range<usize>, f64)| bundles.map(move |_| trips))
        .collect();
        assert_eq!(trips.of_bundles.len(), expected.len());
        for (index, (found, expected)) in trips.of_bundles.iter().zip(expected).enumerate() {
            assert!((found - expected).abs() < 1e-9, "bundle {index}: {found}, not {expected}");
        }
        assert_eq!(trips.data_bundles, 6);
        assert!((trips.steps - 8.0).abs() < 1e-9);
        // One block on the first step, and one of a size in a register, as large, on each.
        assert!((trips.dma_bytes.unwrap() - 9.0 * 64.0 * 32.0).abs() < 1e-9);
        let unreported =
            read(&LISTING.replace("/*size_in_granules=*/64", "/*size_in_granules=*/%s8"));
        assert_eq!(unreported.unwrap().dma_bytes, None, "no copy's size is a constant");
    }

    #[test]
    fn text_that_is_no_listing_has_no_trip_counts() {
        assert_eq!(read(""), None);
        assert_eq!(read("LB: loop body\n== CAPACTIY:\n 1 2 3\n"), None);
    }
}
