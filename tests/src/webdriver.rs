//! A browser that a WebDriver server controls (W3C WebDriver), such as chromedriver.

use std::net::SocketAddr;

use base64::Engine as _;
use serde_json::{Value, json};

use crate::http;

/// Keys that are no characters, as WebDriver names them.
pub const ENTER: &str = "\u{E007}";
pub const BACKSPACE: &str = "\u{E003}";

/// A session: one browser with one window. It ends when this value is dropped.
#[derive(Debug)]
pub struct WebDriver {
    address: SocketAddr,
    session: String,
}

fn command(address: SocketAddr, method: &str, path: &str, body: Option<&Value>) -> Result<Value, String> {
    let body = body.map(Value::to_string).unwrap_or_default();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    );
    let answer = http::exchange(address, &request).map_err(|e| format!("{method} {path}: {e}"))?;
    let value: Value = serde_json::from_str(&answer.body).map_err(|e| format!("{method} {path}: {e}"))?;
    match answer.status {
        200 => Ok(value["value"].clone()),
        status => Err(format!("{method} {path}: {status}: {}", value["value"]["message"])),
    }
}

impl WebDriver {
    /// Starts a browser.
    ///
    /// # Panics
    /// If the server does not start one.
    pub fn start(address: SocketAddr, capabilities: &Value) -> Self {
        let asked = json!({ "capabilities": { "alwaysMatch": capabilities } });
        let started = command(address, "POST", "/session", Some(&asked)).expect("the browser starts");
        Self { address, session: started["sessionId"].as_str().expect("a session").to_owned() }
    }

    fn call(&self, method: &str, what: &str, body: Option<&Value>) -> Value {
        let path = format!("/session/{}{what}", self.session);
        command(self.address, method, &path, body).unwrap_or_else(|why| panic!("{why}"))
    }

    pub fn goto(&self, url: &str) {
        self.call("POST", "/url", Some(&json!({ "url": url })));
    }

    pub fn title(&self) -> String {
        self.call("GET", "/title", None).as_str().unwrap_or_default().to_owned()
    }

    /// Runs a script in the page. Returns what it returns.
    pub fn execute(&self, script: &str) -> Value {
        self.call("POST", "/execute/sync", Some(&json!({ "script": script, "args": [] })))
    }

    /// Types, as on a keyboard: whatever has the focus at each key gets it.
    pub fn type_keys(&self, keys: &str) {
        let strokes: Vec<Value> = keys
            .chars()
            .flat_map(|key| ["keyDown", "keyUp"].map(|stroke| json!({ "type": stroke, "value": key.to_string() })))
            .collect();
        let keyboard = json!({ "type": "key", "id": "keyboard", "actions": strokes });
        self.call("POST", "/actions", Some(&json!({ "actions": [keyboard] })));
    }

    /// Clicks the first element that a CSS selector names.
    pub fn click(&self, selector: &str) {
        let wanted = json!({ "using": "css selector", "value": selector });
        // The page may draw the element anew between the two calls.
        for _ in 0..5 {
            let element = self.call("POST", "/element", Some(&wanted));
            let path = format!("/session/{}/element/{}/click", self.session, id(&element));
            match command(self.address, "POST", &path, Some(&json!({}))) {
                Err(why) if why.contains("stale element") => {}
                clicked => {
                    clicked.unwrap_or_else(|why| panic!("{why}"));
                    return;
                }
            }
        }
        panic!("{selector}: it is drawn anew all the time");
    }

    /// Returns a picture of the window, as PNG.
    pub fn screenshot(&self) -> Vec<u8> {
        let picture = self.call("GET", "/screenshot", None);
        base64::engine::general_purpose::STANDARD.decode(picture.as_str().unwrap_or_default()).expect("a picture")
    }
}

/// Returns the name of an element in the session.
fn id(element: &Value) -> &str {
    element.as_object().and_then(|element| element.values().next()?.as_str()).expect("an element")
}

impl Drop for WebDriver {
    fn drop(&mut self) {
        let _ = command(self.address, "DELETE", &format!("/session/{}", self.session), None);
    }
}
