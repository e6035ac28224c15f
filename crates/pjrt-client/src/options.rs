//! Options of a compilation.

use crate::{Error, Result, Value};

/// How a program is compiled: for one device by default.
///
/// Encodes XLA's `CompileOptionsProto`, of which it knows the fields that matter without a
/// framework above; [`Self::from_bytes`] takes any other.
#[derive(Clone, Debug, PartialEq)]
pub struct CompileOptions {
    encoded: Option<Vec<u8>>,
    replicas: i64,
    partitions: i64,
    devices: Vec<Vec<i64>>,
    portable: bool,
    spmd: bool,
    shardy: bool,
    flags: Vec<(String, Value)>,
}

impl Default for CompileOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl CompileOptions {
    /// For one device: the first.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            encoded: None,
            replicas: 1,
            partitions: 1,
            devices: Vec::new(),
            portable: false,
            spmd: false,
            shardy: false,
            flags: Vec::new(),
        }
    }

    /// A `CompileOptionsProto` as it is. The other functions then change nothing.
    #[must_use]
    pub fn from_bytes(encoded: impl Into<Vec<u8>>) -> Self {
        Self { encoded: Some(encoded.into()), ..Self::new() }
    }

    /// How many copies of the program run side by side on data of their own.
    #[must_use]
    pub const fn replicas(mut self, replicas: i64) -> Self {
        self.replicas = replicas;
        self
    }

    /// Into how many parts each copy is cut. More than one turns XLA's SPMD partitioner on.
    #[must_use]
    pub const fn partitions(mut self, partitions: i64) -> Self {
        self.partitions = partitions;
        self.spmd = partitions > 1;
        self
    }

    /// Whether the partitioner is Shardy, for programs with `sdy` shardings.
    #[must_use]
    pub const fn shardy(mut self, shardy: bool) -> Self {
        self.shardy = shardy;
        self
    }

    /// The devices by their ids: for every partition, one for each replica. The plug-in chooses
    /// where none are given.
    #[must_use]
    pub fn devices(mut self, devices: Vec<Vec<i64>>) -> Self {
        self.devices = devices;
        self
    }

    /// Whether the program, for one device, may run on any of that kind:
    /// [`ExecuteOptions::device`](crate::ExecuteOptions::device).
    #[must_use]
    pub const fn portable(mut self, portable: bool) -> Self {
        self.portable = portable;
        self
    }

    /// Sets a flag of XLA for this program, such as `xla_cpu_enable_fast_math`.
    #[must_use]
    pub fn flag(mut self, name: impl Into<String>, value: impl Into<Value>) -> Self {
        self.flags.push((name.into(), value.into()));
        self
    }

    /// The `CompileOptionsProto`.
    ///
    /// # Errors
    /// Counts and devices do not fit together, or a flag's value is of a kind that no flag has.
    pub fn encode(&self) -> Result<Vec<u8>> {
        if let Some(encoded) = &self.encoded {
            return Ok(encoded.clone());
        }
        self.check()?;
        let mut build = Message::default();
        build.number(4, self.replicas);
        build.number(5, self.partitions);
        build.number(6, self.spmd.into());
        if !self.devices.is_empty() {
            build.message(9, &self.assignment());
        }
        build.number(19, self.shardy.into());

        let mut options = Message::default();
        options.message(3, &build);
        options.number(4, self.portable.into());
        for (name, value) in &self.flags {
            options.message(7, &flag(name, value)?);
        }
        Ok(options.0)
    }

    fn check(&self) -> Result {
        let Self { replicas, partitions, devices, .. } = self;
        if *replicas < 1 || *partitions < 1 {
            return Err(Error::Arguments(format!(
                "{replicas} replicas of {partitions} partitions: both must be at least 1"
            )));
        }
        let fits = devices.len() as i64 == *partitions
            && devices.iter().all(|replica| replica.len() as i64 == *replicas);
        if !devices.is_empty() && !fits {
            return Err(Error::Arguments(format!(
                "devices {devices:?} do not fit: there must be {partitions} lists of {replicas}"
            )));
        }
        if self.portable && (*replicas, *partitions, devices.len()) != (1, 1, 0) {
            return Err(Error::Arguments(
                "a portable program has one replica, one partition and no devices of its own"
                    .into(),
            ));
        }
        Ok(())
    }

    fn assignment(&self) -> Message {
        let mut assignment = Message::default();
        assignment.number(1, self.replicas);
        assignment.number(2, self.partitions);
        for partition in &self.devices {
            let mut ids = Message::default();
            for &id in partition {
                ids.varint(id.cast_unsigned());
            }
            let mut computation = Message::default();
            computation.message(1, &ids);
            assignment.message(3, &computation);
        }
        assignment
    }
}

/// An entry of the map of flags.
fn flag(name: &str, value: &Value) -> Result<Message> {
    let mut inner = Message::default();
    // One of several fields is set: also one with its default value.
    match value {
        Value::Text(text) => inner.bytes(1, text.as_bytes()),
        Value::Bool(value) => inner.field(2, (*value).into()),
        Value::Int(value) => inner.field(3, *value),
        Value::Float(value) => inner.double(4, (*value).into()),
        Value::Ints(_) | Value::Other(_) => {
            return Err(Error::Arguments(format!(
                "flag {name:?} has the value {value:?}; it must be a text, a number or a bool"
            )));
        }
    }
    let mut entry = Message::default();
    entry.bytes(1, name.as_bytes());
    entry.message(2, &inner);
    Ok(entry)
}

/// A protocol buffer in the making.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// A number, unless it is the default.
    fn number(&mut self, field: u64, value: i64) {
        if value != 0 {
            self.field(field, value);
        }
    }

    fn field(&mut self, field: u64, value: i64) {
        self.varint(field << 3);
        self.varint(value.cast_unsigned());
    }

    fn double(&mut self, field: u64, value: f64) {
        self.varint(field << 3 | 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, bytes: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
    }

    fn message(&mut self, field: u64, message: &Self) {
        self.bytes(field, &message.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_device_takes_six_bytes() {
        assert_eq!(CompileOptions::new().encode().unwrap(), [0x1a, 4, 0x20, 1, 0x28, 1]);
        assert_eq!(CompileOptions::from_bytes([1, 2]).encode().unwrap(), [1, 2]);
    }

    #[test]
    fn devices_and_flags_are_encoded() {
        let options = CompileOptions::new().replicas(2).devices(vec![vec![300, 1]]);
        let expected = [
            0x1a, 17, // build options
            0x20, 2, 0x28, 1, // replicas, partitions
            0x4a, 11, 8, 2, 16, 1, // assignment: replicas, partitions
            0x1a, 5, 0x0a, 3, 0xac, 2, 1, // ids, packed
        ];
        assert_eq!(options.encode().unwrap(), expected);
        let options = CompileOptions::new().portable(true).flag("f", false).flag("n", -1_i64);
        let encoded = options.encode().unwrap();
        assert_eq!(encoded[6..8], [0x20, 1]);
        assert_eq!(encoded[8..17], [0x3a, 7, 0x0a, 1, b'f', 0x12, 2, 0x10, 0]);
        assert_eq!(encoded[17..25], [0x3a, 16, 0x0a, 1, b'n', 0x12, 11, 0x18]);
    }

    #[test]
    fn wrong_lengths_are_refused() {
        let error = |options: CompileOptions| options.encode().unwrap_err().to_string();
        let text = error(CompileOptions::new().replicas(2).devices(vec![vec![0]]));
        assert!(text.contains("[[0]]") && text.contains("1 lists of 2"), "{text}");
        assert!(error(CompileOptions::new().partitions(0)).contains("0 partitions"));
        assert!(error(CompileOptions::new().portable(true).replicas(2)).contains("portable"));
        assert!(error(CompileOptions::new().flag("f", vec![1])).contains("\"f\""));
    }
}
