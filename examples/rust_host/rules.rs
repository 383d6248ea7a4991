//! Rules, step 0 of docs/bundles.md: numbers, names, + - *, comparisons and function calls.

use std::cmp::Ordering;
use std::collections::HashMap;

pub type Names = HashMap<String, Value>;

#[derive(Clone, Copy)]
pub enum Value {
    Int(i64),
    Float(f64),
}

impl Value {
    pub fn parse(text: &str) -> Result<Value, String> {
        let wrong = |_| format!("{text:?} is not a number");
        text.parse()
            .map(Value::Int)
            .or_else(|_| text.parse().map(Value::Float))
            .map_err(wrong)
    }
    pub fn int(self) -> i64 {
        match self {
            Value::Int(value) => value,
            Value::Float(value) => value as i64,
        }
    }
    pub fn float(self) -> f64 {
        match self {
            Value::Int(value) => value as f64,
            Value::Float(value) => value,
        }
    }
    fn with(self, other: Value, ints: Checked, floats: fn(f64, f64) -> f64) -> Result<Value, String> {
        match (self, other) {
            (Value::Int(a), Value::Int(b)) => ints(a, b).map(Value::Int).ok_or(TOO_LARGE.into()),
            _ => Ok(Value::Float(floats(self.float(), other.float()))),
        }
    }
    fn compare(self, other: Value) -> Option<Ordering> {
        match (self, other) {
            (Value::Int(a), Value::Int(b)) => Some(a.cmp(&b)),
            _ => self.float().partial_cmp(&other.float()),
        }
    }
}

type Checked = fn(i64, i64) -> Option<i64>;

const TOO_LARGE: &str = "a number does not fit in 64 bits: sizes or strides are too large";

fn div(a: i64, b: i64) -> Option<i64> {
    (b > 0).then(|| a.div_euclid(b))
}

fn modulo(a: i64, b: i64) -> Option<i64> {
    (b > 0).then(|| a.rem_euclid(b))
}

fn ceil_div(a: i64, b: i64) -> Option<i64> {
    Some(div(a, b)? + i64::from(a % b != 0))
}

pub fn round_up(a: i64, b: i64) -> Option<i64> {
    ceil_div(a, b)?.checked_mul(b)
}

fn fewest_splits(groups: i64, tiles: i64, num_sms: i64) -> Option<i64> {
    let work = |splits: i64| {
        let rounds = ceil_div(groups.max(1).checked_mul(splits)?, num_sms)?;
        rounds.checked_mul(ceil_div(tiles, splits)?.checked_add(1)?)
    };
    let mut best = (work(1)?, 1);
    for splits in 2..=tiles.min(256) {
        best = best.min((work(splits)?, splits));
    }
    Some(best.1)
}

/// Key tiles that the query tiles of a head visit, each at least one: query i sees the keys before i + 1 + shift.
fn causal_key_tiles(queries: i64, keys: i64, shift: i64, tile_m: i64, tile_n: i64) -> Option<i64> {
    let (mut tiles, mut first) = (0i64, 0i64);
    while first < queries {
        let end = first.checked_add(tile_m)?.min(queries);
        tiles = tiles.checked_add(ceil_div(keys.min(end.checked_add(shift)?), tile_n)?.max(1))?;
        first = first.checked_add(tile_m)?;
    }
    Some(tiles)
}

/// Whether each stride exceeds what the axes of smaller strides span: no two indices have one element.
fn distinct(sizes_and_strides: &[i64]) -> Option<i64> {
    let mut axes = Vec::new();
    for axis in sizes_and_strides.chunks_exact(2).filter(|axis| axis[0] > 1) {
        axes.push((axis[1].checked_abs()?, axis[0]));
    }
    axes.sort();
    let mut span = 0i64;
    for (stride, size) in axes {
        if stride <= span {
            return Some(0);
        }
        span = span.checked_add((size - 1).checked_mul(stride)?)?;
    }
    Some(1)
}

struct Rule<'a> {
    words: Vec<&'a str>,
    next: usize,
    names: &'a Names,
}

pub fn evaluate(rule: &str, names: &Names) -> Result<Value, String> {
    let mut words = Vec::new();
    let mut rest = rule.trim_start();
    while let Some(first) = rest.chars().next() {
        let is_word = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == '.';
        let end = if is_word(first) {
            rest.find(|letter| !is_word(letter)).unwrap_or(rest.len())
        } else if rest[1..].starts_with('=') {
            2
        } else {
            1
        };
        words.push(&rest[..end]);
        rest = rest[end..].trim_start();
    }
    let mut parser = Rule { words, next: 0, names };
    let value = parser.comparison()?;
    if parser.next == parser.words.len() {
        Ok(value)
    } else {
        Err(format!("rule {rule:?} is not of the rule language"))
    }
}

impl Rule<'_> {
    fn peek(&self) -> &str {
        self.words.get(self.next).copied().unwrap_or("")
    }
    fn accept(&mut self, word: &str) -> bool {
        let found = self.peek() == word;
        self.next += usize::from(found);
        found
    }
    fn comparison(&mut self) -> Result<Value, String> {
        let left = self.sum()?;
        for (word, holds) in [
            ("==", Ordering::is_eq as fn(Ordering) -> bool),
            (">=", Ordering::is_ge),
            ("<=", Ordering::is_le),
            (">", Ordering::is_gt),
        ] {
            if self.accept(word) {
                return Ok(Value::Int(i64::from(left.compare(self.sum()?).is_some_and(holds))));
            }
        }
        Ok(left)
    }
    fn sum(&mut self) -> Result<Value, String> {
        let mut total = self.product()?;
        loop {
            if self.accept("+") {
                total = total.with(self.product()?, i64::checked_add, |a, b| a + b)?
            } else if self.accept("-") {
                total = total.with(self.product()?, i64::checked_sub, |a, b| a - b)?
            } else {
                return Ok(total);
            }
        }
    }
    fn product(&mut self) -> Result<Value, String> {
        let mut total = self.factor()?;
        while self.accept("*") {
            total = total.with(self.factor()?, i64::checked_mul, |a, b| a * b)?
        }
        Ok(total)
    }
    fn factor(&mut self) -> Result<Value, String> {
        if self.accept("-") {
            return Value::Int(0).with(self.factor()?, i64::checked_sub, |a, b| a - b);
        }
        let word = self.peek().to_string();
        self.next += 1;
        let is_call = word == "(" || self.accept("(");
        if !is_call {
            return match self.names.get(&word) {
                Some(value) => Ok(*value),
                None => Value::parse(&word),
            };
        }
        let mut arguments = vec![self.comparison()?];
        while self.accept(",") {
            arguments.push(self.comparison()?)
        }
        if !self.accept(")") {
            return Err(format!("a rule has no ) after {word}"));
        }
        let ints: Vec<i64> = arguments.iter().map(|value| value.int()).collect();
        let value = match (word.as_str(), ints.as_slice()) {
            ("(", [_]) => return Ok(arguments[0]),
            ("ceil_div", [a, b]) => ceil_div(*a, *b),
            ("round_up", [a, b]) => round_up(*a, *b),
            ("div", [a, b]) => div(*a, *b),
            ("mod", [a, b]) => modulo(*a, *b),
            ("min", [a, b]) => Some(*a.min(b)),
            ("max", [a, b]) => Some(*a.max(b)),
            ("step", [size, stride, other]) => Some(if *size == 1 { *other } else { *stride }),
            ("fewest_splits", [groups, tiles, num_sms]) => fewest_splits(*groups, *tiles, *num_sms),
            ("causal_key_tiles", [queries, keys, shift, tile_m, tile_n]) => {
                causal_key_tiles(*queries, *keys, *shift, *tile_m, *tile_n)
            }
            ("distinct", axes) if axes.len() == 8 => distinct(axes),
            _ => return Err(format!("{word} is not a function of the rule language")),
        };
        value.map(Value::Int).ok_or(TOO_LARGE.into())
    }
}
