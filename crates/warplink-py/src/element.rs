//! Element types as Warplink, DLPack and NumPy name them.

use crate::errors::invalid;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyType};
use warplink::DType;

/// Codes of DLPack's `DLDataTypeCode`.
const INT: u8 = 0;
const UINT: u8 = 1;
const FLOAT: u8 = 2;
const BFLOAT: u8 = 4;
const COMPLEX: u8 = 5;
const BOOL: u8 = 6;

/// An element type of arrays, some of which only move and are not computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Element {
    /// Warplink's name.
    pub(crate) name: &'static str,
    /// DLPack's code.
    pub(crate) code: u8,
    /// Bits of an element.
    pub(crate) bits: u8,
    /// NumPy's type string; none where NumPy has no such type.
    pub(crate) typestr: Option<&'static str>,
}

const fn element(name: &'static str, code: u8, bits: u8, typestr: Option<&'static str>) -> Element {
    Element {
        name,
        code,
        bits,
        typestr,
    }
}

const ALL: [Element; 15] = [
    element("u8", UINT, 8, Some("|u1")),
    element("u16", UINT, 16, Some("<u2")),
    element("u32", UINT, 32, Some("<u4")),
    element("u64", UINT, 64, Some("<u8")),
    element("i8", INT, 8, Some("|i1")),
    element("i16", INT, 16, Some("<i2")),
    element("i32", INT, 32, Some("<i4")),
    element("i64", INT, 64, Some("<i8")),
    element("f16", FLOAT, 16, Some("<f2")),
    element("f32", FLOAT, 32, Some("<f4")),
    element("f64", FLOAT, 64, Some("<f8")),
    element("bf16", BFLOAT, 16, None),
    element("c64", COMPLEX, 64, Some("<c8")),
    element("c128", COMPLEX, 128, Some("<c16")),
    element("bool", BOOL, 8, Some("|b1")),
];

/// The name of an element type, as `from_py_with` of an argument: Warplink's name where it has one. A type is named by
/// text, or is NumPy's or PyTorch's own (`numpy.float32`, `numpy.dtype`, `torch.float32`).
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
    let plain = name.trim_start_matches("torch.").trim_end_matches('_');
    let known = Element::named(plain).map(|element| element.name);
    let name = match (plain, known) {
        (_, Ok(name)) => name,
        ("float8_e4m3fn", _) => "f8e4m3",
        ("float8_e5m2", _) => "f8e5m2",
        _ => &name,
    };
    Ok(name.to_owned())
}

impl Element {
    /// The element type of that name: Warplink's, NumPy's or PyTorch's.
    pub(crate) fn named(name: &str) -> PyResult<Self> {
        let plain = name.strip_prefix("torch.").unwrap_or(name);
        let same = |element: &Self| element.name == name || element.long_name() == plain;
        let found = ALL.into_iter().find(same);
        found.ok_or_else(|| {
            let names: Vec<&str> = ALL.iter().map(|element| element.name).collect();
            invalid(format!(
                "unknown element type '{name}'; expected one of {}",
                names.join(", ")
            ))
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
        ALL.into_iter().find(same).filter(|_| lanes == 1)
    }

    /// The element type with NumPy's type string.
    pub(crate) fn of_typestr(typestr: &str) -> Option<Self> {
        ALL.into_iter()
            .find(|element| element.typestr == Some(typestr))
    }

    /// Bytes of an element.
    pub(crate) fn bytes(self) -> usize {
        usize::from(self.bits) / 8
    }

    /// The type that the library computes with.
    pub(crate) fn dtype(self) -> PyResult<DType> {
        self.name.parse().map_err(crate::errors::raise)
    }
}
