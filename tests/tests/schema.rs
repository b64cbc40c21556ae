//! The JSON schema of the control socket, for authors of scripts, is what the types say.

use std::fs;
use std::path::Path;

use forebay_api::protocol::{API_VERSION, Reply, RequestLine};
use schemars::generate::SchemaSettings;
use serde_json::{Value, json};

/// Returns the schema of all lines on the socket. What may be absent in a line is not required: a daemon of an older
/// program leaves out what it does not know.
fn schema() -> Value {
    let mut generator = SchemaSettings::draft2020_12().for_deserialize().into_generator();
    let lines = [generator.subschema_for::<RequestLine>(), generator.subschema_for::<Reply>()];
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": format!("The control socket of Forebay, version {API_VERSION} of the API"),
        "description": "A client sends one line, a RequestLine, and the daemon answers with lines, each a Reply, until the \
                        reply is `end` or `error`. overlay/api/src/protocol.rs says what stays the same in one version.",
        "anyOf": lines,
        "$defs": generator.take_definitions(true),
    })
}

#[test]
fn the_schema_in_the_docs_is_that_of_the_types() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/api.schema.json");
    let made = serde_json::to_string_pretty(&schema()).unwrap() + "\n";
    if std::env::var_os("FOREBAY_BLESS").is_some() {
        fs::write(&file, &made).unwrap();
    }
    assert!(
        fs::read_to_string(&file).unwrap_or_default() == made,
        "docs/api.schema.json is not what the types say: run `make schema`"
    );
}

/// All lines that a schema refers to are in it.
#[test]
fn the_schema_is_complete() {
    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("$ref").and_then(Value::as_str).map(str::to_owned));
                fields.values().for_each(|value| references(value, found));
            }
            Value::Array(values) => values.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }
    let schema = schema();
    let mut found = Vec::new();
    references(&schema, &mut found);
    assert!(found.len() > 50, "{found:?}");
    for reference in found {
        let name = reference.strip_prefix("#/$defs/").unwrap();
        assert!(schema["$defs"].get(name).is_some(), "{name}");
    }
}
