//! A cache node as a reverse proxy: what no client gets, and what no client may keep from the others.

use forebay_tests::cache_node::Node;
use forebay_tests::mount::Place;
use forebay_tests::servers::origin::slow_origin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[test]
fn a_path_that_the_origin_would_read_as_another_one_is_refused() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = asked.clone();
    let url = slow_origin(Duration::ZERO, move |head| {
        seen.lock().unwrap().push(head.lines().next().unwrap_or_default().to_owned());
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok".to_owned()
    });
    let place = Place::new();
    let node = Node::start(&url, &place.fast(), &["--reverse-proxy"]);
    for path in [
        "/public/%%32e%%32e/private/x",
        "/public/%%32%65%%32%65/private/x",
        "/public/.%%32e/private/x",
        "/public/..%%35cprivate/x",
        "/public/%%30%30",
        "/public/%+f",
        "/public/%",
    ] {
        let got = node.get(path, &[]);
        assert_eq!(got.status, 400, "{path}: {}", got.head);
    }
    assert_eq!(asked.lock().unwrap().len(), 0);
    // A query is for the origin alone to read.
    assert_eq!(node.get("/public/x?100%", &[]).status, 200);
    assert_eq!(*asked.lock().unwrap(), ["get /public/x?100% http/1.1"]);
}
