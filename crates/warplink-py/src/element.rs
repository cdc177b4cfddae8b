//! Element types as Warplink, DLPack and NumPy name them.

use crate::errors::invalid;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyType};
use warplink::DType;
use warplink::dtype::Numbers;
use warplink::named::listed;

/// Codes of DLPack's `DLDataTypeCode`.
const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const COMPLEX: u8 = 5;
const BOOL: u8 = 6;

/// An element type of arrays; some can only be moved and not computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Element {
    /// Warplink's name.
    pub(crate) name: &'static str,
    /// DLPack's code.
    pub(crate) code: u8,
    /// Bits of an element.
    pub(crate) bits: u8,
}

/// Types that can only be moved, since the library does not compute with them.
const MOVED: [Element; 5] = [
    Element::new("u16", UINT, 16),
    Element::new("i16", INT, 16),
    Element::new("c64", COMPLEX, 64),
    Element::new("c128", COMPLEX, 128),
    Element::new("bool", BOOL, 8),
];

/// Every element type; floats of 8 bits have no arrays.
fn all() -> impl Iterator<Item = Element> {
    let moved = MOVED.into_iter().filter(|moved| !moved.is_computed());
    DType::ALL.into_iter().filter_map(Element::of).chain(moved)
}

/// For each element type: its name, that of NumPy and PyTorch, and whether the library computes with it.
#[pyfunction]
pub(crate) fn element_types() -> Vec<(&'static str, String, bool)> {
    let row = |element: Element| (element.name, element.long_name(), element.is_computed());
    all().map(row).collect()
}

/// The name of an element type, as `from_py_with` of an argument: Warplink's name if it has one. A type is given by
/// name, or as NumPy's or PyTorch's own object (`numpy.float32`, `numpy.dtype`, `torch.float32`).
pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> PyResult<String> {
    let named = if object.is_instance_of::<PyString>() {
        object.clone()
    } else if object.is_instance_of::<PyType>() {
        object.getattr("__name__")?
    } else {
        match object.getattr("name") {
            Ok(name) if name.is_instance_of::<PyString>() => name,
            _ => object.str()?.into_any(),
        }
    };
    let name: String = named.extract()?;
    // NumPy 1's `bool_` has the suffix.
    let plain = name.trim_start_matches("torch.").trim_end_matches('_');
    let known = Element::named(plain).map(|element| element.name);
    let name = match (plain, known) {
        (_, Ok(name)) => name,
        // PyTorch's names of the types that have no arrays, and thus no `Element`.
        ("float8_e4m3fn", _) => "f8e4m3",
        ("float8_e5m2", _) => "f8e5m2",
        _ => &name,
    };
    Ok(name.to_owned())
}

impl Element {
    const fn new(name: &'static str, code: u8, bits: u8) -> Self {
        Self { name, code, bits }
    }

    /// A type that the library computes with.
    fn of(dtype: DType) -> Option<Self> {
        let code = match dtype.numbers() {
            // DLPack 1.0 has no codes for them, and NumPy has no types.
            Numbers::Float { .. } if dtype.size() == 1 => return None,
            Numbers::Float { digits: 8, .. } => BFLOAT,
            Numbers::Float { .. } => FLOAT,
            Numbers::Signed => INT,
            Numbers::Unsigned => UINT,
        };
        Some(Self::new(dtype.name(), code, 8 * dtype.size() as u8))
    }

    /// NumPy's type string; `None` if NumPy has no such type.
    pub(crate) fn typestr(self) -> Option<String> {
        // NumPy marks single bytes as without order; all else is little-endian, as are the library's platforms.
        let order = if self.bits == 8 { '|' } else { '<' };
        let kind = match self.code {
            INT => 'i',
            UINT => 'u',
            FLOAT => 'f',
            COMPLEX => 'c',
            BOOL => 'b',
            _ => return None,
        };
        Some(format!("{order}{kind}{}", self.bytes()))
    }

    /// The element type of that name: Warplink's, NumPy's or PyTorch's.
    pub(crate) fn named(name: &str) -> PyResult<Self> {
        let plain = name.strip_prefix("torch.").unwrap_or(name);
        let same = |element: &Self| element.name == name || element.long_name() == plain;
        all().find(same).ok_or_else(|| {
            let names = listed(all().map(|element| element.name));
            invalid(format!("unknown element type '{name}'; expected {names}"))
        })
    }

    /// NumPy's and PyTorch's name.
    fn long_name(self) -> String {
        let kind = match self.code {
            UINT => "uint",
            INT => "int",
            BFLOAT => "bfloat",
            COMPLEX => "complex",
            BOOL => return self.name.to_owned(),
            _ => "float",
        };
        format!("{kind}{}", self.bits)
    }

    /// The element type with DLPack's `code`, `bits` and `lanes`, if Warplink has a name for it.
    pub(crate) fn of_dlpack(code: u8, bits: u8, lanes: u16) -> Option<Self> {
        let same = |element: &Element| element.code == code && element.bits == bits;
        // A vector type has several numbers per element; shapes would be off by that factor.
        all().find(same).filter(|_| lanes == 1)
    }

    /// The element type with NumPy's type string.
    pub(crate) fn of_typestr(typestr: &str) -> Option<Self> {
        all().find(|element| element.typestr().as_deref() == Some(typestr))
    }

    /// Bytes of an element.
    pub(crate) fn bytes(self) -> usize {
        usize::from(self.bits) / 8
    }

    fn is_computed(self) -> bool {
        self.name.parse::<DType>().is_ok()
    }

    /// The type that the library computes with.
    pub(crate) fn dtype(self) -> PyResult<DType> {
        self.name.parse().map_err(crate::errors::raise)
    }
}
