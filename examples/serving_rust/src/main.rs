//! examples/serving_c in Rust: an engine with a paged cache on the crate of an export. Prefill, append, 64 decode steps
//! under one captured graph, a speculative step of several rows, and a prefix that all conversations share, on each
//! device (two at most). Everything is checked against plain loops in double precision.
//!
//!     cutlass-py-attn export --library --arch sm_80,sm_90a -o library --problem ... (those of examples/serving_c/main.c)
//!     cp -r examples/serving_rust serving_rust && cd serving_rust
//!     cargo run --release --offline [-- conversations prompt heads heads_key page_size]

mod driver;

use attention_sys::*;
use std::ffi::{c_void, CStr};
use std::mem::size_of_val;
use std::ptr::{null, null_mut};

const D: usize = 128; // head_dim
const STEPS: usize = 64;
const GUESSES: usize = 4; // rows of the speculative step
const DEVICES: usize = 2; // at most

/// The engine's own kernel: one thread for each conversation makes room for its next token. Ends with a zero byte.
const ADVANCE: &str = concat!(include_str!("advance.ptx"), "\0");

// Arrays: values as doubles on the host, bfloat16 on the device.

fn to_bf16(value: f64) -> u16 {
    let bits = (value as f32).to_bits(); // to nearest, ties to even
    ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) as u16
}

fn from_bf16(half: u16) -> f64 {
    f32::from_bits((half as u32) << 16) as f64
}

fn allocate(bytes: usize) -> u64 {
    let mut address = 0;
    driver::allocate(&mut address, bytes.max(1));
    address
}

fn upload<T>(address: u64, data: &[T]) {
    driver::copy_to_device(address, data.as_ptr() as *const c_void, size_of_val(data));
}

fn uploaded<T>(data: &[T]) -> u64 {
    let address = allocate(size_of_val(data));
    upload(address, data);
    address
}

#[derive(Clone, Default)]
struct Rows {
    host: Vec<f64>,
    device: u64,
}

/// Numbers from -2 to 2, by a linear congruential generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        4.0 * ((self.0 >> 11) as f64 / (1u64 << 53) as f64) - 2.0
    }

    fn rows(&mut self, count: usize) -> Rows {
        let halves: Vec<u16> = (0..count).map(|_| to_bf16(self.next())).collect();
        Rows {
            host: halves.iter().map(|half| from_bf16(*half)).collect(),
            device: uploaded(&halves),
        }
    }
}

/// Attention of one query row, [heads, D], to rows [heads_key, D], in double precision.
fn reference(query: &[f64], keys: &[f64], values: &[f64], heads_key: usize) -> Vec<f64> {
    let (heads, count) = (query.len() / D, keys.len() / (heads_key * D));
    let mut output = vec![0.0; heads * D];
    for h in 0..heads {
        let row = |rows: &[f64], j: usize| -> Vec<f64> {
            let first = (j * heads_key + h / (heads / heads_key)) * D;
            rows[first..first + D].to_vec()
        };
        let query = &query[h * D..(h + 1) * D];
        let dot = |key: &[f64]| query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>();
        let weights: Vec<f64> = (0..count).map(|j| (dot(&row(keys, j)) / (D as f64).sqrt()).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for (j, weight) in weights.iter().enumerate() {
            for (i, value) in row(values, j).iter().enumerate() {
                output[h * D + i] += weight / sum * value;
            }
        }
    }
    output
}

struct Engine {
    ordinal: usize,
    good: bool,
    random: Random,
    context: *mut c_void,
    stream: *mut c_void,
    advance: *mut c_void,
    device: *mut Device,
    target: Target,
    batch: usize, // the last conversation is padding of the graph's batch: it has no keys
    heads: usize,
    heads_key: usize,
    page_size: usize,
    max_pages: usize,
    num_pages: usize,
    longest: usize,
    table: Vec<i32>,       // [batch, max_pages]
    keys: Vec<Vec<f64>>,   // of each conversation, [length, heads_key, D]
    values: Vec<Vec<f64>>,
    key_pool: u64, // [num_pages, page_size, heads_key, D]
    value_pool: u64,
    page_table: u64,
    lengths: u64,
    slots: u64,
    workspace: u64,
    workspace_bytes: usize,
    query: Rows, // of the phase that is running
    key: Rows,
    value: Rows,
    output: u64,
    logsumexp: u64,
}

fn expect(status: Status, error: &Error) {
    assert!(status == OK, "{}", error.text());
}

impl Engine {
    fn open(ordinal: usize, sizes: &[usize]) -> Engine {
        let &[conversations, prompt, heads, heads_key, page_size] = sizes else {
            panic!("five sizes")
        };
        let (mut number, mut context, mut stream) = (0, null_mut(), null_mut());
        let (mut module, mut advance) = (null_mut(), null_mut());
        driver::device_get(&mut number, ordinal as i32);
        driver::retain_context(&mut context, number);
        driver::set_context(context);
        driver::create_stream(&mut stream, 1); // does not wait for the default stream
        driver::load_module(&mut module, ADVANCE.as_ptr() as *const c_void);
        driver::module_function(&mut advance, module, c"advance".as_ptr());
        let (mut device, mut target, mut error) = (null_mut(), Target::default(), Error::default());
        expect(unsafe { attention_open(&mut device, null(), 0, &mut error) }, &error);
        expect(unsafe { attention_target_of(device, &mut target, &mut error) }, &error);

        let batch = conversations + 1;
        let max_pages = (prompt + STEPS + GUESSES).div_ceil(page_size);
        let num_pages = (batch + 1) * max_pages; // also of the shared prefix
        let pool = num_pages * page_size * heads_key * D;
        let table: Vec<i32> = (0..batch * max_pages).map(|i| (num_pages - 1 - i) as i32).collect();
        let (key_pool, value_pool) = (allocate(2 * pool), allocate(2 * pool));
        driver::fill_16(key_pool, 0x7FC0, pool); // NaN: rows behind the last key are never used
        driver::fill_16(value_pool, 0x7FC0, pool);
        Engine {
            ordinal,
            good: true,
            random: Random(1),
            context,
            stream,
            advance,
            device,
            target,
            batch,
            heads,
            heads_key,
            page_size,
            max_pages,
            num_pages,
            longest: prompt,
            page_table: uploaded(&table),
            table,
            keys: vec![Vec::new(); batch],
            values: vec![Vec::new(); batch],
            key_pool,
            value_pool,
            lengths: allocate(4 * batch),
            slots: allocate(8 * batch * (prompt + GUESSES)),
            workspace: 0,
            workspace_bytes: 0,
            query: Rows::default(),
            key: Rows::default(),
            value: Rows::default(),
            output: allocate(2 * batch * prompt.max(STEPS) * heads * D),
            logsumexp: allocate(4 * batch * heads * (prompt + 32)),
        }
    }

    // Calls of the library. Strides come from attention_packed, so that rows never overlap.

    fn new_call(&self, direction: i32, flags: u32) -> Call {
        Call {
            direction,
            flags,
            dtype: BF16,
            head_dim: D as i32,
            head_dim_value: D as i32,
            num_heads: self.heads as i64,
            num_heads_key: self.heads_key as i64,
            scale: 1.0 / (D as f64).sqrt(),
            ..Call::default()
        }
    }

    fn packed(&self, mut call: Call) -> Call {
        let mut error = Error::default();
        expect(unsafe { attention_packed(&mut call, &mut error) }, &error);
        call
    }

    fn append_call(&self, tokens: usize) -> Call {
        let mut call = self.packed(Call {
            tokens_k: tokens as i64,
            num_pages: self.num_pages as i64,
            page_size: self.page_size as i64,
            ..self.new_call(APPEND, 0)
        });
        (call.key.address, call.value.address) = (self.key.device, self.value.device);
        (call.key_cache.address, call.value_cache.address) = (self.key_pool, self.value_pool);
        call.slots = self.slots;
        call
    }

    /// Attention of all conversations to their pages; tokens: rows of packed queries, 0 for as many of each.
    fn paged_call(&self, num_queries: usize, tokens: usize) -> Call {
        let mut call = self.packed(Call {
            batch: self.batch as i64,
            num_queries: num_queries as i64,
            tokens_q: tokens as i64,
            page_size: self.page_size as i64,
            max_pages: self.max_pages as i64,
            num_pages: self.num_pages as i64,
            num_keys: (self.max_pages * self.page_size) as i64,
            window_right: if num_queries > 1 { 0 } else { -1 }, // causal: the last query sees all keys
            ..self.new_call(FORWARD, if tokens > 0 { PAGED | VARLEN } else { PAGED })
        });
        call.query.address = self.query.device;
        (call.key.address, call.value.address) = (self.key_pool, self.value_pool);
        (call.output.address, call.logsumexp) = (self.output, self.logsumexp);
        (call.page_table, call.seqused_k) = (self.page_table, self.lengths);
        call
    }

    /// Makes the workspace large enough for a call, and names its kernel.
    fn reserve(&mut self, what: &str, call: &Call) {
        let (mut error, mut symbol, mut bytes) = (Error::default(), null(), 0);
        expect(
            unsafe { attention_choose(call, &self.target, &mut symbol, &mut bytes, &mut error) },
            &error,
        );
        let symbol = unsafe { CStr::from_ptr(symbol) }.to_string_lossy();
        println!("device {}: {what:<12} {symbol}, {bytes} bytes of workspace", self.ordinal);
        if bytes > self.workspace_bytes {
            (self.workspace, self.workspace_bytes) = (allocate(bytes), bytes);
        }
    }

    fn launch(&self, call: &Call) {
        let mut error = Error::default();
        let status =
            unsafe { attention_launch(self.device, call, self.workspace, self.workspace_bytes, self.stream, &mut error) };
        expect(status, &error);
    }

    // The engine's state

    fn row(&self) -> usize {
        self.heads * D
    }

    fn row_key(&self) -> usize {
        self.heads_key * D
    }

    fn length(&self, b: usize) -> usize {
        self.keys[b].len() / self.row_key()
    }

    fn is_padding(&self, b: usize) -> bool {
        b == self.batch - 1
    }

    /// Slot of the next token of a conversation.
    fn next_slot(&self, b: usize) -> i64 {
        let position = self.length(b);
        let page = self.table[b * self.max_pages + position / self.page_size] as usize;
        (page * self.page_size + position % self.page_size) as i64
    }

    /// Notes row `row` of the phase's key and value as the next one of a conversation.
    fn remember(&mut self, b: usize, row: usize) {
        let columns = row * self.row_key()..(row + 1) * self.row_key();
        self.keys[b].extend_from_slice(&self.key.host[columns.clone()]);
        self.values[b].extend_from_slice(&self.value.host[columns]);
    }

    fn upload_lengths(&self) {
        let lengths: Vec<i32> = (0..self.batch).map(|b| self.length(b) as i32).collect();
        upload(self.lengths, &lengths);
    }

    /// What row `i` of the phase's query has to be: over all that its conversation has cached.
    fn wanted(&self, b: usize, i: usize) -> Vec<f64> {
        let query = &self.query.host[i * self.row()..(i + 1) * self.row()];
        reference(query, &self.keys[b], &self.values[b], self.heads_key)
    }

    fn compare(&mut self, name: &str, wanted: &[f64]) {
        let mut found = vec![0u16; wanted.len()];
        driver::copy_to_host(found.as_mut_ptr() as *mut c_void, self.output, size_of_val(&found[..]));
        let largest = wanted.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
        let errors = found.iter().zip(wanted).map(|(half, value)| (from_bf16(*half) - value).abs());
        let worst = errors.fold(0.0, |most: f64, error| if error <= most { most } else { error }); // keeps a NaN
        let good = worst <= 0.01 * largest.max(1.0); // rounding of bfloat16
        self.good &= good;
        println!(
            "device {}: {name:<12} {:8} elements, largest {largest:7.4}, worst error {worst:.6}: {}",
            self.ordinal,
            wanted.len(),
            if good { "ok" } else { "WRONG" }
        );
    }

    fn draw(&mut self, queries: usize, tokens: usize) {
        let (row, row_key) = (self.row(), self.row_key());
        self.query = self.random.rows(queries * row);
        self.key = self.random.rows(tokens * row_key);
        self.value = self.random.rows(tokens * row_key);
    }

    // Phases

    /// Stores the prompts, of different lengths, and attends to them: queries of all conversations one after another.
    fn prefill(&mut self) {
        driver::set_context(self.context);
        let prompts: Vec<usize> = (0..self.batch)
            .map(|b| if self.is_padding(b) { 0 } else { self.longest - b * self.longest / self.batch })
            .collect();
        let tokens = prompts.iter().sum();
        self.draw(tokens, tokens);
        let (mut starts, mut slots, mut wanted) = (vec![0i32], Vec::new(), Vec::new());
        for (b, length) in prompts.iter().enumerate() {
            for _ in 0..*length {
                let i = slots.len();
                slots.push(self.next_slot(b));
                self.remember(b, i);
                wanted.extend(self.wanted(b, i));
            }
            starts.push(slots.len() as i32);
        }
        upload(self.slots, &slots);
        self.upload_lengths();
        let append = self.append_call(tokens);
        let mut forward = self.paged_call(*prompts.iter().max().unwrap(), tokens);
        forward.cu_seqlens_q = uploaded(&starts);
        self.reserve("append", &append);
        self.reserve("prefill", &forward);
        self.launch(&append);
        self.launch(&forward);
        driver::synchronise(self.stream);
        self.compare("prefill", &wanted);
    }

    /// Puts 64 steps on the stream: one graph, in which lengths grow on the device. Nothing waits in between.
    fn start_decode(&mut self) {
        driver::set_context(self.context);
        let (query_bytes, key_bytes) = (2 * self.batch * self.row(), 2 * self.batch * self.row_key());
        self.draw(STEPS * self.batch, STEPS * self.batch); // what the layers before attention would compute
        let (mut append, mut decode) = (self.append_call(self.batch), self.paged_call(1, 0));
        (append.key.address, append.value.address) = (allocate(key_bytes), allocate(key_bytes));
        (decode.query.address, decode.output.address) = (allocate(query_bytes), allocate(query_bytes));
        self.reserve("decode", &decode);

        let (mut graph, mut replay) = (null_mut(), null_mut());
        let (mut page_size, mut max_pages) = (self.page_size as u32, self.max_pages as u32);
        let mut parameters = [
            &mut self.lengths as *mut u64 as *mut c_void,
            &mut self.slots as *mut u64 as *mut c_void,
            &mut self.page_table as *mut u64 as *mut c_void,
            &mut page_size as *mut u32 as *mut c_void,
            &mut max_pages as *mut u32 as *mut c_void,
        ];
        driver::begin_capture(self.stream, 0);
        let threads = self.batch as u32;
        let (given, none) = (parameters.as_mut_ptr(), null_mut());
        driver::launch_kernel(self.advance, 1, 1, 1, threads, 1, 1, 0, self.stream, given, none);
        self.launch(&append);
        self.launch(&decode);
        driver::end_capture(self.stream, &mut graph);
        driver::instantiate(&mut replay, graph, 0);
        for step in 0..STEPS {
            let of_step = |rows: &Rows, bytes: usize| rows.device + (step * bytes) as u64;
            let on = self.stream;
            driver::copy_on_stream(decode.query.address, of_step(&self.query, query_bytes), query_bytes, on);
            driver::copy_on_stream(append.key.address, of_step(&self.key, key_bytes), key_bytes, on);
            driver::copy_on_stream(append.value.address, of_step(&self.value, key_bytes), key_bytes, on);
            driver::launch_graph(replay, on);
            let output = self.output + (step * query_bytes) as u64;
            driver::copy_on_stream(output, decode.output.address, query_bytes, on);
        }
    }

    fn finish_decode(&mut self) {
        driver::set_context(self.context);
        let mut wanted = Vec::new();
        for i in 0..STEPS * self.batch {
            let b = i % self.batch;
            if !self.is_padding(b) {
                self.remember(b, i);
            }
            wanted.extend(self.wanted(b, i));
        }
        driver::synchronise(self.stream);
        self.compare("64 decodes", &wanted);
    }

    /// Four guessed tokens of each conversation at once: each sees those before it.
    fn speculate(&mut self) {
        driver::set_context(self.context);
        let count = self.batch * GUESSES;
        self.draw(count, count);
        let (mut slots, mut wanted) = (Vec::new(), Vec::new());
        for i in 0..count {
            let b = i / GUESSES;
            slots.push(if self.is_padding(b) { -1 } else { self.next_slot(b) });
            if !self.is_padding(b) {
                self.remember(b, i);
            }
            wanted.extend(self.wanted(b, i));
        }
        upload(self.slots, &slots);
        self.upload_lengths();
        let (append, forward) = (self.append_call(count), self.paged_call(GUESSES, 0));
        self.reserve("speculative", &forward);
        self.launch(&append);
        self.launch(&forward);
        driver::synchronise(self.stream);
        self.compare("speculative", &wanted);
    }

    /// A prefix in pages of its own, read once for all conversations: their queries are those of one sequence. A merge
    /// joins the result with that of each conversation's own pages; the padding row, which has none, gets the prefix.
    fn share_prefix(&mut self) {
        driver::set_context(self.context);
        let (batch, heads, row) = (self.batch, self.heads, self.row());
        let prefix = self.max_pages * self.page_size - 3;
        let padded = batch.next_multiple_of(32);
        self.draw(batch, prefix);
        let mut append = self.append_call(prefix);
        append.slots = uploaded(&(0..prefix as i64).collect::<Vec<_>>());
        let mut own = self.paged_call(1, 0);
        own.output.address = allocate(2 * batch * row);
        own.logsumexp = allocate(4 * batch * heads * 32);
        let mut shared = own; // without a mask: each query sees all of the prefix
        (shared.batch, shared.num_queries) = (1, batch as i64);
        (shared.query.batch, shared.output.batch) = ((batch * row) as i64, (batch * row) as i64);
        shared.page_table = uploaded(&(0..self.max_pages as i32).collect::<Vec<_>>());
        shared.seqused_k = uploaded(&[prefix as i32]);
        shared.output.address = allocate(2 * batch * row);
        shared.logsumexp = allocate(4 * heads * padded);
        let mut merge = self.packed(Call {
            batch: batch as i64,
            num_queries: 1,
            ..self.new_call(MERGE, 0)
        });
        (merge.output_a.address, merge.output_b.address) = (shared.output.address, own.output.address);
        (merge.logsumexp_a, merge.logsumexp_b) = (allocate(4 * batch * heads * 32), own.logsumexp);
        (merge.output.address, merge.logsumexp) = (self.output, self.logsumexp);
        self.reserve("prefix", &shared);
        self.reserve("merge", &merge);
        self.launch(&append);
        self.launch(&shared);
        self.launch(&own);
        let side = |device: u64, pitch: usize| driver::Side {
            x_in_bytes: 0,
            y: 0,
            memory_type: 2, // the device's
            host: 0,
            device,
            array: 0,
            pitch,
        };
        for h in 0..heads {
            // logsumexp from [1, heads, queries] to [batch, heads, 1], both padded to 32
            let copy = driver::Copy2D {
                source: side(shared.logsumexp + (4 * h * padded) as u64, 4),
                target: side(merge.logsumexp_a + (4 * h * 32) as u64, 4 * 32 * heads),
                width_in_bytes: 4,
                height: batch,
            };
            driver::copy_2d_on_stream(&copy, self.stream);
        }
        self.launch(&merge);
        driver::synchronise(self.stream);
        let mut wanted = Vec::new();
        for b in 0..batch {
            let keys = [&self.key.host[..], &self.keys[b]].concat(); // the prefix, and the conversation behind it
            let values = [&self.value.host[..], &self.values[b]].concat();
            wanted.extend(reference(&self.query.host[b * row..(b + 1) * row], &keys, &values, self.heads_key));
        }
        self.compare("prefix", &wanted);
    }
}

fn main() {
    let mut sizes = vec![5, 200, 8, 2, 16];
    let given: Vec<usize> = std::env::args().skip(1).map(|word| word.parse().expect("five numbers")).collect();
    if !given.is_empty() {
        assert!(given.len() == 5, "usage: serving [conversations prompt heads heads_key page_size]");
        sizes = given;
    }
    let mut count = 0;
    driver::init(0);
    driver::device_count(&mut count);
    let mut engines: Vec<Engine> = (0..DEVICES.min(count as usize)).map(|i| Engine::open(i, &sizes)).collect();
    engines.iter_mut().for_each(Engine::prefill);
    engines.iter_mut().for_each(Engine::start_decode); // on all devices at once
    engines.iter_mut().for_each(Engine::finish_decode);
    engines.iter_mut().for_each(Engine::speculate);
    engines.iter_mut().for_each(Engine::share_prefix);
    for engine in &engines {
        unsafe { attention_close(engine.device) }; // all its launches are done; the other handles stay open
    }
    let good = engines.iter().all(|engine| engine.good);
    println!("{}", if good { "passed" } else { "FAILED" });
    std::process::exit(if good { 0 } else { 1 });
}
