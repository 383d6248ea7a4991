//! Launches a bundle's kernels from manifest.json with Rust's standard library and libcuda, without the package.
//!
//!     rustc --edition 2021 -O --crate-type cdylib lib.rs -C link-arg=-l:libcuda.so.1
//!
//! The numbered steps are those of docs/bundles.md. A real program would parse JSON with serde_json and call the
//! driver through cudarc; both are written out here so that no crate is needed.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_void, CStr, CString};
use std::fs;

mod json;
mod rules;
mod sha256;

use json::Json;
use rules::{evaluate, round_up, Names, Value};
use sha256::sha256;

type Address = u64;

// The driver

#[repr(C)]
struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_memory: c_uint,
    stream: *mut c_void,
    attributes: *mut c_void,
    attribute_count: c_uint,
}

/// CUlaunchAttribute whose value is the cluster dimension.
#[repr(C)]
struct LaunchAttribute {
    id: c_uint,
    pad: [u8; 4],
    cluster: [c_uint; 3],
    rest: [u8; 52],
}

const CLUSTER_DIMENSION: c_uint = 4;

#[repr(C, align(128))]
struct TensorMap([u8; 128]);

extern "C" {
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int;
    fn cuLibraryLoadData(
        library: *mut *mut c_void,
        code: *const c_void,
        a: *mut c_void,
        b: *mut c_void,
        c: c_uint,
        d: *mut c_void,
        e: *mut c_void,
        f: c_uint,
    ) -> c_int;
    fn cuLibraryGetKernel(kernel: *mut *mut c_void, library: *mut c_void, name: *const c_char) -> c_int;
    fn cuKernelSetAttribute(attribute: c_int, value: c_int, kernel: *mut c_void, device: c_int) -> c_int;
    fn cuMemsetD8Async(address: Address, byte: c_uchar, count: usize, stream: *mut c_void) -> c_int;
    fn cuTensorMapEncodeTiled(
        map: *mut TensorMap,
        dtype: c_int,
        rank: c_uint,
        address: *mut c_void,
        sizes: *const u64,
        strides: *const u64,
        box_: *const u32,
        steps: *const u32,
        interleave: c_int,
        swizzle: c_int,
        l2_promotion: c_int,
        oob_fill: c_int,
    ) -> c_int;
    fn cuLaunchKernelEx(
        config: *const LaunchConfig,
        kernel: *mut c_void,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> c_int;
}

const MULTIPROCESSOR_COUNT: c_int = 16;
const MAJOR: c_int = 75;
const MINOR: c_int = 76;
const SHARED_MEMORY_OPTIN: c_int = 97;
const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;

fn check(call: &str, code: c_int) -> Result<(), String> {
    if code == 0 {
        Ok(())
    } else {
        Err(format!("{call}: CUresult {code}"))
    }
}

fn attribute(which: c_int) -> Result<i64, String> {
    let mut value = 0;
    check("cuDeviceGetAttribute", unsafe {
        cuDeviceGetAttribute(&mut value, which, 0)
    })?;
    Ok(value.into())
}

/// One pass (forward or backward) of a bundle on device 0, whose context must be current.
pub struct Host {
    inputs: Names,
    target: Json,
    kernels: Vec<*mut c_void>,
    num_sms: i64,
}

impl Host {
    pub fn open(folder: &str, direction: &str) -> Result<Host, String> {
        let read =
            |name: &str| fs::read(format!("{folder}/{name}")).map_err(|error| format!("{folder}/{name}: {error}"));
        let manifest = Json::read(&String::from_utf8_lossy(&read("manifest.json")?))?;
        if manifest.get("format")?.text() != "cutlass_py_attn bundle 5" {
            return Err(format!("{folder}: its format is not this host's"));
        }
        let Json::Object(mut manifest) = manifest else {
            return Err("the manifest is not an object".into());
        };
        let mut part = |name: &str| manifest.remove(name).ok_or(format!("the manifest has no {name:?}"));
        let (files, problems) = (part("files")?, part("problems")?);
        let Json::List(problems) = problems else {
            return Err("problems is not a list".into());
        };
        let pass = problems
            .into_iter()
            .find(|item| item.find("direction").map_or("", Json::text) == direction)
            .ok_or(format!("{folder} has no {direction}"))?;
        let mut inputs = Names::new();
        if let Json::Object(items) = pass.get("inputs")? {
            for (name, item) in items {
                inputs.insert(name.clone(), Value::parse(item.get("value")?.text())?);
            }
        }
        let target = Host::choose(take(pass, "targets")?)?;
        let name = target.get("cubin")?.text();
        let cubin = read(name)?;
        if sha256(&cubin) != files.get(name)?.get("sha256")?.text() {
            return Err(format!(
                "{folder}/{name}: its SHA-256 is not that of manifest.json; export it again"
            ));
        }
        let kernels = Host::load(&target, &cubin)?;
        Ok(Host {
            inputs,
            target,
            kernels,
            num_sms: attribute(MULTIPROCESSOR_COUNT)?,
        })
    }

    // 1  The target

    fn choose(targets: Json) -> Result<Json, String> {
        let device = [attribute(MAJOR)?, attribute(MINOR)?];
        let available = attribute(SHARED_MEMORY_OPTIN)?;
        let Json::List(targets) = targets else {
            return Err("targets is not a list".into());
        };
        for target in targets {
            let asked: Vec<i64> = target.get("compute_capability")?.list().iter().map(Json::int).collect();
            let later = target.get("later_minors")?.is_true() && device[0] == asked[0] && device[1] >= asked[1];
            let mut largest = 0;
            for launch in target.get("launches")?.list() {
                largest = largest.max(launch.get("shared_memory_bytes")?.int());
            }
            if (later || device[..] == asked[..]) && largest <= available {
                return Ok(target);
            }
        }
        Err(format!("no cubin for compute capability {}.{}", device[0], device[1]))
    }

    // 2  The kernels

    fn load(target: &Json, cubin: &[u8]) -> Result<Vec<*mut c_void>, String> {
        let none = std::ptr::null_mut;
        let mut code = cubin.to_vec();
        code.push(0);
        let mut library = none();
        check("cuLibraryLoadData", unsafe {
            cuLibraryLoadData(&mut library, code.as_ptr().cast(), none(), none(), 0, none(), none(), 0)
        })?;
        let mut kernels = Vec::new();
        for launch in target.get("launches")?.list() {
            let symbol = CString::new(launch.get("symbol")?.text()).map_err(|error| error.to_string())?;
            let limit = launch.get("shared_memory_bytes")?.int() as c_int;
            let mut kernel = none();
            check("cuLibraryGetKernel", unsafe {
                cuLibraryGetKernel(&mut kernel, library, symbol.as_ptr())
            })?;
            check("cuKernelSetAttribute", unsafe {
                cuKernelSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES, limit, kernel, 0)
            })?;
            kernels.push(kernel);
        }
        Ok(kernels)
    }

    // 3  Numbers

    fn numbers(&self, changes: &Names) -> Result<Names, String> {
        let mut names = self.inputs.clone();
        names.extend(changes.iter().map(|(name, value)| (name.clone(), *value)));
        names.insert("num_sms".into(), Value::Int(self.num_sms));
        self.expect("conditions", &names)?;
        for item in self.target.get("definitions")?.list() {
            let value = evaluate(item.get("rule")?.text(), &names)?;
            names.insert(item.get("name")?.text().into(), value);
        }
        self.expect("limits", &names)?;
        Ok(names)
    }

    fn expect(&self, key: &str, names: &Names) -> Result<(), String> {
        for item in self.target.get(key)?.list() {
            if evaluate(item.get("rule")?.text(), names)?.int() == 0 {
                return Err(item.get("says")?.text().into());
            }
        }
        Ok(())
    }

    // 4  The workspace

    fn workspace(&self, names: &Names) -> Result<(i64, i64, HashMap<String, i64>), String> {
        let space = self.target.get("workspace")?;
        let alignment = space.get("alignment")?.int();
        let too_large = "the workspace does not fit in 64 bits";
        let (mut end, mut zeroed, mut offsets) = (0i64, 0, HashMap::new());
        for part in space.get("buffers")?.list() {
            if evaluate(part.get("when")?.text(), names)?.int() == 0 {
                continue;
            }
            offsets.insert(part.get("name")?.text().to_string(), end);
            let bytes = evaluate(part.get("bytes_rule")?.text(), names)?.int();
            end = end.checked_add(bytes).ok_or(too_large)?;
            if part.get("zeroed")?.is_true() {
                zeroed = end;
            }
            end = round_up(end, alignment).ok_or(too_large)?;
        }
        Ok((end, zeroed, offsets))
    }

    // 5  The struct

    fn structure(
        &self,
        names: &Names,
        addresses: &Names,
        parts: &HashMap<String, i64>,
        workspace: Address,
    ) -> Result<Vec<u8>, String> {
        let structure = self.target.get("struct")?;
        let mut block = vec![0u8; structure.get("bytes")?.int() as usize];
        for field in structure.get("fields")?.list() {
            let value = if let Some(name) = field.find("pointer") {
                *addresses
                    .get(name.text())
                    .ok_or(format!("{} has no address", name.text()))?
            } else if let Some(name) = field.find("workspace") {
                Value::Int(parts.get(name.text()).map_or(0, |offset| workspace as i64 + offset))
            } else {
                evaluate(field.get("rule")?.text(), names)?
            };
            let narrow = |_| format!("{} does not fit in 32 bits", field.get("name").map_or("", Json::text));
            let bytes = match field.get("type")?.text() {
                "f32" => (value.float() as f32).to_le_bytes().to_vec(),
                "i32" => i32::try_from(value.int()).map_err(narrow)?.to_le_bytes().to_vec(),
                _ => value.int().to_le_bytes().to_vec(),
            };
            let offset = field.get("offset")?.int() as usize;
            block[offset..offset + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(block)
    }

    // 6  Tensor maps

    fn tensor_map(recipe: &Json, names: &Names, addresses: &Names) -> Result<TensorMap, String> {
        let values = |key: &str| -> Result<Vec<i64>, String> {
            recipe
                .get(key)?
                .list()
                .iter()
                .map(|rule| Ok(evaluate(rule.text(), names)?.int()))
                .collect()
        };
        let place = |key: &str, names: &[&str]| -> Result<c_int, String> {
            let word = recipe.get(key)?.text();
            let place = names
                .iter()
                .position(|name| *name == word)
                .ok_or(format!("{key} {word} is unknown"))?;
            Ok(place as c_int)
        };
        let item = recipe.get("item_bytes")?.int();
        let sizes: Vec<u64> = values("size_rules")?.iter().map(|size| *size as u64).collect();
        let strides: Vec<u64> = values("stride_rules")?
            .iter()
            .map(|stride| (stride * item) as u64)
            .collect();
        let small =
            |key: &str| -> Result<Vec<u32>, String> { Ok(values(key)?.iter().map(|size| *size as u32).collect()) };
        let (box_, steps) = (small("box_rules")?, small("element_strides")?);
        let names = ["uint8", "", "", "", "", "", "float16", "float32", "", "bfloat16"];
        let dtype = place("dtype", &names)?; // CUtensorMapDataType of cuda.h
        let swizzle = place("swizzle", &["NONE", "32B", "64B", "128B"])?;
        let promotion = place("l2_promotion", &["NONE", "64B", "128B", "256B"])?;
        let pointer = recipe.get("pointer")?.text();
        let address = addresses.get(pointer).ok_or(format!("{pointer} has no address"))?.int() as *mut c_void;
        let mut map = TensorMap([0; 128]);
        check("cuTensorMapEncodeTiled", unsafe {
            cuTensorMapEncodeTiled(
                &mut map,
                dtype,
                sizes.len() as c_uint,
                address,
                sizes.as_ptr(),
                strides.as_ptr(),
                box_.as_ptr(),
                steps.as_ptr(),
                0,
                swizzle,
                promotion,
                0,
            )
        })?;
        Ok(map)
    }

    // 7  The launches

    pub fn launch(
        &self,
        changes: &Names,
        addresses: &Names,
        workspace: Address,
        stream: *mut c_void,
    ) -> Result<(), String> {
        let names = self.numbers(changes)?;
        let (_, zeroed, parts) = self.workspace(&names)?;
        let mut block = self.structure(&names, addresses, &parts, workspace)?;
        if zeroed > 0 {
            check("cuMemsetD8Async", unsafe {
                cuMemsetD8Async(workspace, 0, zeroed as usize, stream)
            })?;
        }
        for (launch, kernel) in self.target.get("launches")?.list().iter().zip(&self.kernels) {
            if evaluate(launch.get("when")?.text(), &names)?.int() == 0 {
                continue;
            }
            let recipes = launch.get("tensor_maps")?.list();
            let mut maps = recipes
                .iter()
                .map(|recipe| Host::tensor_map(recipe, &names, addresses))
                .collect::<Result<Vec<_>, _>>()?;
            let mut parameters: Vec<*mut c_void> = maps.iter_mut().map(|map| (map as *mut TensorMap).cast()).collect();
            parameters.push(block.as_mut_ptr().cast());
            let mut grid = [0; 3];
            for (size, rule) in grid.iter_mut().zip(launch.get("grid_rules")?.list()) {
                let blocks = evaluate(rule.text(), &names)?.int();
                *size = c_uint::try_from(blocks).map_err(|_| format!("a grid of {blocks} blocks is too large"))?;
            }
            let mut cluster = LaunchAttribute {
                id: CLUSTER_DIMENSION,
                pad: [0; 4],
                cluster: [1; 3],
                rest: [0; 52],
            };
            for (size, number) in cluster.cluster.iter_mut().zip(launch.get("cluster")?.list()) {
                *size = number.int() as c_uint;
            }
            let mut config = LaunchConfig {
                grid,
                block: [1; 3],
                shared_memory: launch.get("shared_memory_bytes")?.int() as c_uint,
                stream,
                attribute_count: (cluster.cluster != [1; 3]) as c_uint,
                attributes: (&mut cluster as *mut LaunchAttribute).cast(),
            };
            for (size, number) in config.block.iter_mut().zip(launch.get("block")?.list()) {
                *size = number.int() as c_uint;
            }
            check("cuLaunchKernelEx", unsafe {
                cuLaunchKernelEx(&config, *kernel, parameters.as_mut_ptr(), std::ptr::null_mut())
            })?;
        }
        Ok(())
    }
}

fn take(object: Json, key: &str) -> Result<Json, String> {
    match object {
        Json::Object(mut items) => items.remove(key).ok_or(format!("the manifest has no {key:?}")),
        _ => Err(format!("the manifest has no {key:?}")),
    }
}

// C interface: numbers and addresses are lines "name value"; an error is a text

unsafe fn text<'a>(given: *const c_char) -> &'a str {
    CStr::from_ptr(given).to_str().unwrap_or("")
}

fn parse(lines: &str) -> Result<Names, String> {
    lines
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, value)| Ok((name.to_string(), Value::parse(value)?)))
        .collect()
}

/// Launches one pass of the bundle in `folder` and sets `bytes` to the workspace size. If a workspace is needed and
/// `workspace` is 0, nothing is launched. Returns 0, or 1 with a message in `error` (512 bytes).
///
/// # Safety
/// Strings must be zero-terminated; addresses must be those of device arrays as the manifest describes them.
#[no_mangle]
pub unsafe extern "C" fn bundle_launch(
    folder: *const c_char,
    direction: *const c_char,
    numbers: *const c_char,
    addresses: *const c_char,
    workspace: Address,
    stream: *mut c_void,
    bytes: *mut i64,
    error: *mut c_char,
) -> c_int {
    let launched = || -> Result<(), String> {
        let host = Host::open(text(folder), text(direction))?;
        let (numbers, addresses) = (parse(text(numbers))?, parse(text(addresses))?);
        *bytes = host.workspace(&host.numbers(&numbers)?)?.0;
        if *bytes > 0 && workspace == 0 {
            Ok(())
        } else {
            host.launch(&numbers, &addresses, workspace, stream)
        }
    };
    let Err(words) = launched() else { return 0 };
    let words = &words.as_bytes()[..words.len().min(511)];
    std::ptr::copy_nonoverlapping(words.as_ptr().cast(), error, words.len());
    *error.add(words.len()) = 0;
    1
}
