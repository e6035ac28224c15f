//! How elements lie in memory, and how many there are.

use std::ptr::null_mut;

use crate::{
    DType, Error, Result,
    abi::{self, Padded},
    raw,
};

/// How the elements of a buffer lie on the device.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Layout {
    /// Dimension after dimension, in tiles if there are any.
    Tiled {
        /// The dimensions, the one whose elements lie side by side first.
        minor_to_major: Vec<i64>,
        /// Sizes of the tiles, those of the outer ones first.
        tiles: Vec<Vec<i64>>,
    },
    /// Bytes from one index of a dimension to the next.
    Strides(Vec<i64>),
}

impl Layout {
    /// # Safety
    /// The layout's pointers lead to what they should.
    pub(crate) unsafe fn decode(
        layout: &abi::MemoryLayout,
        function: &'static str,
    ) -> Result<Self> {
        // SAFETY: the type says which field of the union is set, and the pointers lead to as much
        // as the counts beside them say.
        unsafe {
            match layout.r#type {
                abi::LAYOUT_TILED => {
                    let tiled = layout.layout.tiled;
                    let sizes = raw::slice(tiled.tile_dim_sizes, tiled.num_tiles);
                    let mut dims = raw::slice(tiled.tile_dims, sizes.iter().sum());
                    let mut tiles = Vec::with_capacity(sizes.len());
                    for &size in sizes {
                        let (tile, rest) = dims.split_at(size);
                        tiles.push(tile.to_vec());
                        dims = rest;
                    }
                    let order = raw::slice(tiled.minor_to_major, tiled.minor_to_major_size);
                    Ok(Self::Tiled { minor_to_major: order.to_vec(), tiles })
                }
                abi::LAYOUT_STRIDES => {
                    let strides = layout.layout.strides;
                    let strides = raw::slice(strides.byte_strides, strides.num_byte_strides);
                    Ok(Self::Strides(strides.to_vec()))
                }
                number => Err(Error::malformed(function, format!("a layout of type {number}"))),
            }
        }
    }
}

/// The layout of `order`, from the minor dimension to the major, without tiles, for as long as
/// `order` lives.
pub(crate) fn untiled(order: &[i64]) -> Padded<abi::MemoryLayout> {
    let mut layout = Padded::<abi::MemoryLayout>::new();
    layout.r#type = abi::LAYOUT_TILED;
    layout.layout.tiled = abi::MemoryLayoutTiled {
        struct_size: size_of::<abi::MemoryLayoutTiled>(),
        extension_start: null_mut(),
        minor_to_major: order.as_ptr(),
        minor_to_major_size: order.len(),
        tile_dims: std::ptr::null(),
        tile_dim_sizes: std::ptr::null(),
        num_tiles: 0,
    };
    layout
}

/// In which order elements reach the host: dimensions, from the minor to the major.
#[derive(Clone, Debug)]
pub(crate) struct Order {
    pub(crate) dims: Vec<i64>,
    pub(crate) minor_to_major: Vec<i64>,
}

impl Order {
    /// That of a buffer, or row-major where it has none that can be asked for.
    pub(crate) fn new(dims: &[i64], layout: Option<Layout>) -> Self {
        let rank = dims.len();
        let minor_to_major = match layout {
            Some(Layout::Tiled { minor_to_major, .. }) if is_permutation(&minor_to_major, rank) => {
                minor_to_major
            }
            _ => (0_i64..).take(rank).collect::<Vec<_>>().into_iter().rev().collect(),
        };
        Self { dims: dims.into(), minor_to_major }
    }

    /// Whether nothing is to be moved.
    pub(crate) fn is_row_major(&self) -> bool {
        let mut matter = self.minor_to_major.iter().filter(|&&dim| self.dims[dim as usize] != 1);
        let mut last = i64::MAX;
        matter.all(|&dim| std::mem::replace(&mut last, dim) > dim)
    }

    /// The elements of `from`, each of `size` bytes, in row-major order.
    pub(crate) fn to_row_major(&self, from: &[u8], size: usize, to: &mut Vec<u8>) {
        let mut strides = vec![0; self.dims.len()];
        let mut stride = size;
        for &dim in &self.minor_to_major {
            strides[dim as usize] = stride;
            stride *= self.dims[dim as usize] as usize;
        }
        if from.is_empty() {
            return;
        }
        let (mut index, mut offset) = (vec![0_i64; self.dims.len()], 0);
        loop {
            to.extend_from_slice(&from[offset..offset + size]);
            let mut dim = self.dims.len();
            loop {
                if dim == 0 {
                    return;
                }
                dim -= 1;
                index[dim] += 1;
                offset += strides[dim];
                if index[dim] < self.dims[dim] {
                    break;
                }
                offset -= strides[dim] * self.dims[dim] as usize;
                index[dim] = 0;
            }
        }
    }
}

fn is_permutation(order: &[i64], rank: usize) -> bool {
    let mut sorted = order.to_vec();
    sorted.sort_unstable();
    sorted.len() == rank && sorted.iter().zip(0_i64..).all(|(&dim, index)| dim == index)
}

/// How many elements the dimensions take.
pub(crate) fn count(dtype: DType, dims: &[i64]) -> Result<usize> {
    let wrong = |reason| Error::WrongDims { dtype, dims: dims.into(), reason };
    let mut count = 1_usize;
    for &dim in dims {
        let dim = usize::try_from(dim).map_err(|_| wrong("one is negative"))?;
        count = count.checked_mul(dim).ok_or_else(|| wrong("so many elements cannot be"))?;
    }
    match count.checked_mul(dtype.size()) {
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(count),
        _ => Err(wrong("so many bytes cannot be")),
    }
}

/// Sees that there are `len` elements.
pub(crate) fn check_len(dtype: DType, dims: &[i64], len: usize) -> Result {
    let expected = count(dtype, dims)?;
    if len == expected {
        return Ok(());
    }
    let unit = format!("elements of {dtype}");
    Err(Error::WrongLength { unit, expected, found: len, dims: dims.into() })
}

/// Sees that there are `len` bytes.
pub(crate) fn check_bytes(dtype: DType, dims: &[i64], len: usize) -> Result {
    let expected = count(dtype, dims)? * dtype.size();
    if len == expected {
        return Ok(());
    }
    let unit = format!("bytes of {dtype}");
    Err(Error::WrongLength { unit, expected, found: len, dims: dims.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_order_becomes_row_major() {
        let order = |dims: &[i64], order: &[i64]| {
            let layout = Layout::Tiled { minor_to_major: order.into(), tiles: vec![] };
            Order::new(dims, Some(layout))
        };
        for rows in [&[1, 0][..], &[1, 2, 0]] {
            assert!(order(&[4, 5, 1][..rows.len()], rows).is_row_major());
        }
        assert!(order(&[1, 7], &[0, 1]).is_row_major());
        assert!(order(&[2, 3], &[0, 0]).is_row_major(), "what is no order is not taken");
        assert!(Order::new(&[2, 3], None).is_row_major());

        let columns = order(&[2, 3], &[0, 1]);
        assert!(!columns.is_row_major());
        let mut rows = Vec::new();
        columns.to_row_major(&[0, 0, 3, 3, 1, 1, 4, 4, 2, 2, 5, 5], 2, &mut rows);
        assert_eq!(rows, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]);

        // Element [a, b, c] is worth 100 a + 10 b + c, and lies at b + 3 (a + 2 c).
        let middle = order(&[2, 3, 4], &[1, 0, 2]);
        let value = |a, b, c| 100 * a + 10 * b + c;
        let mut from = vec![0_u8; 24];
        let mut expected = Vec::new();
        for (a, b, c) in (0..24_u8).map(|i| (i / 12, i / 4 % 3, i % 4)) {
            from[usize::from(b + 3 * (a + 2 * c))] = value(a, b, c);
            expected.push(value(a, b, c));
        }
        let mut rows = Vec::new();
        middle.to_row_major(&from, 1, &mut rows);
        assert_eq!(rows, expected);
    }

    #[test]
    fn elements_are_counted() {
        assert_eq!(count(DType::F32, &[]).unwrap(), 1);
        assert_eq!(count(DType::F32, &[3, 0, 5]).unwrap(), 0);
        assert_eq!(count(DType::Bf16, &[3, 4]).unwrap(), 12);
        for dims in [&[-1][..], &[i64::MAX, 4], &[i64::MAX / 2]] {
            let error = count(DType::F32, dims).unwrap_err().to_string();
            assert!(error.contains(&format!("{dims:?} of f32")), "{error}");
        }
        let error = check_len(DType::F64, &[2, 3], 5).unwrap_err().to_string();
        assert_eq!(error, "5 elements of f64 do not fill [2, 3], which takes 6");
        let error = check_bytes(DType::F64, &[2, 3], 5).unwrap_err().to_string();
        assert_eq!(error, "5 bytes of f64 do not fill [2, 3], which takes 48");
    }
}
