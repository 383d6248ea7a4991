//! Rules, step 0 of docs/bundles.md: numbers, names, + - *, comparisons and function calls.

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
    fn with(self, other: Value, ints: fn(i64, i64) -> i64, floats: fn(f64, f64) -> f64) -> Value {
        match (self, other) {
            (Value::Int(a), Value::Int(b)) => Value::Int(ints(a, b)),
            _ => Value::Float(floats(self.float(), other.float())),
        }
    }
}

pub fn ceil_div(a: i64, b: i64) -> i64 {
    (a + b - 1).div_euclid(b)
}

fn fewest_splits(groups: i64, tiles: i64, num_sms: i64) -> i64 {
    let work = |splits: &i64| ceil_div(groups.max(1) * splits, num_sms) * (ceil_div(tiles, *splits) + 1);
    (1..=tiles.min(256).max(1)).min_by_key(work).unwrap_or(1)
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
            ("==", (|a, b| a == b) as fn(f64, f64) -> bool),
            (">=", |a, b| a >= b),
            ("<=", |a, b| a <= b),
            (">", |a, b| a > b),
        ] {
            if self.accept(word) {
                return Ok(Value::Int(i64::from(holds(left.float(), self.sum()?.float()))));
            }
        }
        Ok(left)
    }
    fn sum(&mut self) -> Result<Value, String> {
        let mut total = self.product()?;
        loop {
            if self.accept("+") {
                total = total.with(self.product()?, |a, b| a + b, |a, b| a + b)
            } else if self.accept("-") {
                total = total.with(self.product()?, |a, b| a - b, |a, b| a - b)
            } else {
                return Ok(total);
            }
        }
    }
    fn product(&mut self) -> Result<Value, String> {
        let mut total = self.factor()?;
        while self.accept("*") {
            total = total.with(self.factor()?, |a, b| a * b, |a, b| a * b)
        }
        Ok(total)
    }
    fn factor(&mut self) -> Result<Value, String> {
        if self.accept("-") {
            return Ok(Value::Int(0).with(self.factor()?, |a, b| a - b, |a, b| a - b));
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
        Ok(Value::Int(match (word.as_str(), ints.as_slice()) {
            ("(", [_]) => return Ok(arguments[0]),
            ("ceil_div", [a, b]) => ceil_div(*a, *b),
            ("round_up", [a, b]) => ceil_div(*a, *b) * b,
            ("div", [a, b]) => a.div_euclid(*b),
            ("mod", [a, b]) => a.rem_euclid(*b),
            ("min", [a, b]) => *a.min(b),
            ("max", [a, b]) => *a.max(b),
            ("step", [size, stride, other]) => {
                if *size == 1 {
                    *other
                } else {
                    *stride
                }
            }
            ("fewest_splits", [groups, tiles, num_sms]) => fewest_splits(*groups, *tiles, *num_sms),
            _ => return Err(format!("{word} is not a function of the rule language")),
        }))
    }
}
