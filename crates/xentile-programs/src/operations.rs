//! Programs by an operation's name, for tools that know none: an operation whose programs this build
//! writes has a line in [`PROGRAMS`]. Those of others come from JAX.

use xentile::Result;
use xentile::operation::{Pass, Problem};

use crate::{Implementation, Program, cross_entropy};

/// The programs of each operation that has any here.
const PROGRAMS: &[(&str, WriteProgram)] = &[("cross_entropy", cross_entropy::program)];

/// Writes the program of a pass, whose arguments and results are those of the operation's signature.
///
/// # Errors
/// More elements than memory can address.
pub type WriteProgram = fn(&Problem, Pass, Implementation) -> Result<Program>;

/// What writes programs of the operation called `name`.
#[must_use]
pub fn programs(name: &str) -> Option<WriteProgram> {
    PROGRAMS.iter().find(|(has, _)| *has == name).map(|(_, write)| *write)
}
