//! What XLA passes to a custom call: its C interface (`xla/ffi/api/c_api.h`), as far as it is used here.
//!
//! Structures begin with their size and a list of extensions, and new releases append fields.

use std::ffi::{CString, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::ptr;
use warplink::{Error, ErrorKind, Result};

/// The newest version of the interface that this file has been compared with.
const VERSION: (c_int, c_int) = (0, 3);

/// Extension that asks for the handler's metadata instead of a call.
const METADATA: c_int = 1;

/// The stage in which a handler is called for each execution.
const EXECUTE: c_int = 3;

/// Types of attributes.
const SCALAR: c_int = 3;
const STRING: c_int = 4;

/// The number of 64-bit integers among element types.
const S64: c_int = 5;

/// XLA's error, which the caller owns.
pub(super) type RawError = c_void;

#[repr(C)]
struct Extension {
    size: usize,
    kind: c_int,
    next: *mut Extension,
}

#[repr(C)]
struct MetadataExtension {
    base: Extension,
    metadata: *mut Metadata,
}

#[repr(C)]
struct Version {
    size: usize,
    extensions: *mut Extension,
    major: c_int,
    minor: c_int,
}

#[repr(C)]
struct Metadata {
    size: usize,
    version: Version,
    traits: u32,
}

/// Arguments or results.
#[repr(C)]
struct Values {
    size: usize,
    extensions: *mut Extension,
    count: i64,
    types: *const c_int,
    values: *const *const RawBuffer,
}

#[repr(C)]
struct RawBuffer {
    size: usize,
    extensions: *mut Extension,
    dtype: c_int,
    data: *mut c_void,
    rank: i64,
    dims: *const i64,
}

#[repr(C)]
struct Attributes {
    size: usize,
    extensions: *mut Extension,
    count: i64,
    types: *const c_int,
    names: *const *const Span,
    values: *const *const c_void,
}

#[repr(C)]
struct Span {
    start: *const u8,
    length: usize,
}

#[repr(C)]
struct Scalar {
    dtype: c_int,
    value: *const c_void,
}

#[repr(C)]
struct Api {
    size: usize,
    extensions: *mut Extension,
    version: Version,
    internal: *const c_void,
    create_error: unsafe extern "C" fn(*mut NewError) -> *mut RawError,
    get_message: *const c_void,
    destroy_error: unsafe extern "C" fn(*mut OldError),
    register_handler: *const c_void,
    get_stream: unsafe extern "C" fn(*mut StreamOf) -> *mut RawError,
    // Functions that are not used here: their number fixes the offset of the next one.
    others: [*const c_void; 12],
    get_ordinal: unsafe extern "C" fn(*mut OrdinalOf) -> *mut RawError,
}

#[repr(C)]
struct NewError {
    size: usize,
    extensions: *mut Extension,
    message: *const c_char,
    code: c_int,
}

#[repr(C)]
struct OldError {
    size: usize,
    extensions: *mut Extension,
    error: *mut RawError,
}

#[repr(C)]
struct StreamOf {
    size: usize,
    extensions: *mut Extension,
    context: *mut c_void,
    stream: *mut c_void,
}

#[repr(C)]
struct OrdinalOf {
    size: usize,
    extensions: *mut Extension,
    context: *mut c_void,
    ordinal: i32,
}

/// A call as XLA passes it.
#[repr(C)]
pub(super) struct Frame {
    size: usize,
    extensions: *mut Extension,
    api: *const Api,
    context: *mut c_void,
    stage: c_int,
    arguments: Values,
    results: Values,
    attributes: Attributes,
}

/// Memory of an argument or a result.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffer {
    pub(super) dtype: c_int,
    pub(super) address: u64,
    pub(super) elements: usize,
}

/// A call that is being executed.
pub(super) struct Call<'a> {
    frame: *const Frame,
    valid: PhantomData<&'a Frame>,
}

/// Answers what XLA asks of a handler, and gives the call if it is to be executed.
///
/// # Safety
/// `frame` is a frame of XLA's, valid for `'a`.
pub(super) unsafe fn called<'a>(frame: *mut Frame) -> Option<Call<'a>> {
    // SAFETY: the caller passes a valid frame, whose extensions are a list that ends with null.
    unsafe {
        let mut extension = (*frame).extensions;
        while !extension.is_null() {
            if (*extension).kind == METADATA {
                let metadata = (*extension.cast::<MetadataExtension>()).metadata;
                let api = &(*(*frame).api).version;
                // Reporting a newer version than XLA's own is an error there; a newer XLA accepts its older minor
                // versions.
                let (major, minor) = VERSION.min((api.major, api.minor));
                (*metadata).version.major = major;
                (*metadata).version.minor = minor;
                // Not compatible with command buffers: XLA would record the call once, and the handler would not run
                // again.
                (*metadata).traits = 0;
                return None;
            }
            extension = (*extension).next;
        }
        // XLA also calls handlers to instantiate, prepare and initialize; there is nothing to do at these stages.
        ((*frame).stage == EXECUTE).then_some(Call {
            frame,
            valid: PhantomData,
        })
    }
}

impl Call<'_> {
    fn frame(&self) -> &Frame {
        // SAFETY: the frame is valid for this lifetime, by the contract of `called`.
        unsafe { &*self.frame }
    }

    fn api(&self) -> &Api {
        // SAFETY: as for the frame.
        unsafe { &*self.frame().api }
    }

    /// The first argument.
    pub(super) fn source(&self) -> Result<Buffer> {
        first(&self.frame().arguments, "argument")
    }

    /// The first result.
    pub(super) fn target(&self) -> Result<Buffer> {
        first(&self.frame().results, "result")
    }

    /// The attribute `name`, an integer.
    pub(super) fn integer(&self, name: &str) -> Result<i64> {
        let value = self.attribute(name, SCALAR)?.cast::<Scalar>();
        // SAFETY: an attribute of this type is a valid scalar.
        let scalar = unsafe { &*value };
        if scalar.dtype != S64 {
            return Err(Error::invalid(format!(
                "the attribute {name} has the element type {}; expected a 64-bit integer",
                scalar.dtype
            )));
        }
        // SAFETY: a scalar of this type points to an integer of this size.
        Ok(unsafe { scalar.value.cast::<i64>().read_unaligned() })
    }

    /// The attribute `name`, a text.
    pub(super) fn text(&self, name: &str) -> Result<&str> {
        let value = self.attribute(name, STRING)?.cast::<Span>();
        // SAFETY: an attribute of this type is a valid span, which is valid as long as the frame.
        let bytes = unsafe { (*value).bytes() };
        std::str::from_utf8(bytes)
            .map_err(|_| Error::invalid(format!("the attribute {name} is no text in UTF-8")))
    }

    fn attribute(&self, name: &str, kind: c_int) -> Result<*const c_void> {
        let attributes = &self.frame().attributes;
        for at in 0..usize::try_from(attributes.count).unwrap_or(0) {
            // SAFETY: the arrays have as many elements as `count` says, and names are valid spans.
            let (named, found, value) = unsafe {
                let named = (**attributes.names.add(at)).bytes();
                (named, *attributes.types.add(at), *attributes.values.add(at))
            };
            if named == name.as_bytes() && found == kind {
                return Ok(value);
            }
        }
        Err(Error::invalid(format!(
            "the call has no attribute {name} of the type that is expected; \
             help: make calls by the functions of warplink.jax"
        )))
    }

    /// The driver's handle of the stream on which the program runs.
    pub(super) fn stream(&self) -> Result<u64> {
        let mut arguments = StreamOf {
            size: size_of::<StreamOf>(),
            extensions: ptr::null_mut(),
            context: self.frame().context,
            stream: ptr::null_mut(),
        };
        // SAFETY: the function is XLA's, and gets a valid structure.
        let error = unsafe { (self.api().get_stream)(&raw mut arguments) };
        if error.is_null() {
            return Ok(arguments.stream as u64);
        }
        let mut old = OldError {
            size: size_of::<OldError>(),
            extensions: ptr::null_mut(),
            error,
        };
        // SAFETY: as above, of an error that belongs to this call.
        // An error that XLA returns is owned by the caller and would leak.
        unsafe { (self.api().destroy_error)(&raw mut old) };
        let message = "XLA gives no stream for the call";
        Err(Error::unsupported(message))
    }

    /// Number of the device among those of the process; 0 if XLA does not say.
    pub(super) fn ordinal(&self) -> usize {
        let mut arguments = OrdinalOf {
            size: size_of::<OrdinalOf>(),
            extensions: ptr::null_mut(),
            context: self.frame().context,
            ordinal: 0,
        };
        // Older releases have a shorter table: reading the field would be out of bounds.
        if self.api().size >= size_of::<Api>() {
            // SAFETY: the function is there, by the structure's size, and gets a valid structure.
            let error = unsafe { (self.api().get_ordinal)(&raw mut arguments) };
            debug_assert!(error.is_null(), "XLA knows the device of a call");
        }
        usize::try_from(arguments.ordinal).unwrap_or(0)
    }

    /// XLA's error for `error`, which its caller owns.
    pub(super) fn error(&self, error: &Error) -> *mut RawError {
        let text: Vec<u8> = error.to_string().into_bytes();
        // CString rejects them, and the text may come from a peer.
        let text = text.into_iter().filter(|byte| *byte != 0).collect();
        // There is no 0 in it any more.
        let message = CString::new::<Vec<u8>>(text).unwrap_or_default();
        let mut arguments = NewError {
            size: size_of::<NewError>(),
            extensions: ptr::null_mut(),
            message: message.as_ptr(),
            code: code(error.kind()),
        };
        // SAFETY: the function is XLA's, and copies the message.
        unsafe { (self.api().create_error)(&raw mut arguments) }
    }
}

impl Span {
    /// # Safety
    /// The span is XLA's, and its bytes are valid for `'a`.
    unsafe fn bytes<'a>(&self) -> &'a [u8] {
        if self.length == 0 {
            return &[];
        }
        // SAFETY: by the contract.
        unsafe { std::slice::from_raw_parts(self.start, self.length) }
    }
}

/// The first of `values`, described as `what`.
fn first(values: &Values, what: &str) -> Result<Buffer> {
    if values.count < 1 {
        return Err(Error::invalid(format!("the call has no {what}")));
    }
    // SAFETY: there is at least one, and all are buffers: the interface has no other type.
    let buffer = unsafe { &**values.values };
    let rank = usize::try_from(buffer.rank).unwrap_or(0);
    let dims: &[i64] = if rank == 0 {
        &[]
    } else {
        // SAFETY: a buffer has as many dimensions as its rank says.
        unsafe { std::slice::from_raw_parts(buffer.dims, rank) }
    };
    let elements = dims.iter().try_fold(1_usize, |product, dim| {
        product.checked_mul(usize::try_from(*dim).ok()?)
    });
    let elements =
        elements.ok_or_else(|| Error::invalid(format!("the {what} has the shape {dims:?}")))?;
    Ok(Buffer {
        dtype: buffer.dtype,
        address: buffer.data as u64,
        elements,
    })
}

/// The code of `absl::Status` that is nearest to a kind of error.
fn code(kind: ErrorKind) -> c_int {
    match kind {
        ErrorKind::InvalidArgument | ErrorKind::Mismatch | ErrorKind::Parse => 3,
        ErrorKind::Timeout => 4,
        ErrorKind::OutOfMemory => 8,
        ErrorKind::Closed => 9,
        ErrorKind::Unsupported | ErrorKind::LibraryMissing => 12,
        ErrorKind::PeerLost | ErrorKind::PeerLeft | ErrorKind::PeerFailed | ErrorKind::GivenUp => {
            14
        }
        _ => 13,
    }
}
