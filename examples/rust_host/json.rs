//! JSON parser for manifests. Numbers remain text until their type is known.

use std::collections::HashMap;

pub enum Json {
    Nothing,
    Bool(bool),
    Number(String),
    Text(String),
    List(Vec<Json>),
    Object(HashMap<String, Json>),
}

impl Json {
    pub fn read(text: &str) -> Result<Json, String> {
        Json::value(&mut text.trim_start())
    }

    fn value(rest: &mut &str) -> Result<Json, String> {
        match rest.chars().next().ok_or("the manifest ends early")? {
            '{' => Ok(Json::Object(
                Json::items(rest, '}', |rest| {
                    let Json::Text(key) = Json::value(rest)? else {
                        return Err("a key is not a string".into());
                    };
                    Json::skip(rest, ':')?;
                    Ok((key, Json::value(rest)?))
                })?
                .into_iter()
                .collect(),
            )),
            '[' => Ok(Json::List(Json::items(rest, ']', Json::value)?)),
            '"' => {
                let mut text = String::new();
                let mut chars = rest.char_indices().skip(1);
                while let Some((place, letter)) = chars.next() {
                    match letter {
                        '"' => {
                            *rest = rest[place + 1..].trim_start();
                            return Ok(Json::Text(text));
                        }
                        '\\' => text.push(match chars.next() {
                            Some((_, 'n')) => '\n',
                            Some((_, 't')) => '\t',
                            other => other.ok_or("the manifest ends within a string")?.1,
                        }),
                        _ => text.push(letter),
                    }
                }
                Err("the manifest ends within a string".into())
            }
            _ => {
                let end = rest.find([',', ']', '}', '\n', ' ']).unwrap_or(rest.len());
                let word = rest[..end].to_string();
                *rest = rest[end..].trim_start();
                Ok(match word.as_str() {
                    "null" => Json::Nothing,
                    "true" => Json::Bool(true),
                    "false" => Json::Bool(false),
                    _ => Json::Number(word),
                })
            }
        }
    }

    fn items<T>(
        rest: &mut &str,
        end: char,
        mut item: impl FnMut(&mut &str) -> Result<T, String>,
    ) -> Result<Vec<T>, String> {
        let mut found = Vec::new();
        *rest = rest[1..].trim_start();
        while !rest.starts_with(end) {
            found.push(item(rest)?);
            if !rest.starts_with(end) {
                Json::skip(rest, ',')?;
            }
        }
        Json::skip(rest, end)?;
        Ok(found)
    }

    fn skip(rest: &mut &str, letter: char) -> Result<(), String> {
        *rest = rest
            .strip_prefix(letter)
            .ok_or(format!("the manifest lacks a {letter:?}"))?
            .trim_start();
        Ok(())
    }

    pub fn find(&self, key: &str) -> Option<&Json> {
        match self {
            Json::Object(items) => items.get(key),
            _ => None,
        }
    }
    pub fn get(&self, key: &str) -> Result<&Json, String> {
        self.find(key).ok_or(format!("the manifest has no {key:?}"))
    }
    pub fn text(&self) -> &str {
        match self {
            Json::Text(text) | Json::Number(text) => text,
            _ => "",
        }
    }
    pub fn list(&self) -> &[Json] {
        match self {
            Json::List(items) => items,
            _ => &[],
        }
    }
    pub fn int(&self) -> i64 {
        self.text().parse().unwrap_or(0)
    }
    pub fn is_true(&self) -> bool {
        matches!(self, Json::Bool(true))
    }
}
