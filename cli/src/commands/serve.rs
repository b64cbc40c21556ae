//! `forebay serve` and `forebay sign-url`

use std::path::PathBuf;
use std::time::SystemTime;

use forebay_daemon::cache_node::{self, CacheNodeConfig, CacheNodeReady};
use forebay_daemon::config::MountConfig;
use forebay_daemon::{Failure, policy_files};
use forebay_serve::{AccessRules, FreshnessOptions, LogFormat, parse};
use url::Url;

use super::{mount, processes};
use crate::allocator;
use crate::args::{AccessLogFormat, ServeArgs, SignUrlArgs};
use crate::exit::Exit;
use crate::output::Output;

pub fn run(args: ServeArgs, output: &Output) -> Result<Exit, Failure> {
    let config = config(args)?;
    processes::log();
    cache_node::run(config, allocator::give_back_in_background, &|ready| {
        told(ready, output);
        mount::notify_systemd();
    })?;
    Ok(Exit::Done)
}

fn config(args: ServeArgs) -> Result<CacheNodeConfig, Failure> {
    let policy = args.policy.map(|file| {
        let files = policy_files::read(&file)?;
        policy_files::compile(&files, &args.url)?;
        Ok::<_, Failure>(files)
    });
    let format = match args.access_log_format {
        AccessLogFormat::Combined => LogFormat::Combined,
        AccessLogFormat::Json => LogFormat::Json,
    };
    Ok(CacheNodeConfig {
        mount: MountConfig {
            pool: args.url.clone(),
            mountpoint: PathBuf::from(cache_node::ROOT).join(args.name),
            fast: args.fast,
            limit_bytes: args.limit.map(|limit| limit.as_u64()),
            policy: policy.transpose()?,
            read_only: true,
            immutable: args.immutable,
            allow_other: false,
            throttle: args.throttle,
            threads: None,
            memory_bytes: args.memory.map(|memory| memory.as_u64()),
            metrics: args.metrics,
            peers: args.peers,
            kernel_options: Vec::new(),
            mask_hooks: Vec::new(),
            accounts: Default::default(),
            origin: args.reverse_proxy.then(|| args.url.clone()),
        },
        listen: args.listen,
        tls: args.tls_cert.zip(args.tls_key),
        access: args.access,
        user: args.user,
        listings: args.listings,
        rate: args.rate,
        freshness: FreshnessOptions {
            stale_while_revalidate: args.stale_while_revalidate,
            stale_if_error: args.stale_if_error,
            negative: args.negative_ttl,
            unspecified: args.default_ttl,
        },
        forward_changes: args.forward_changes,
        log: args.access_log.map(|file| (file, format)),
        connections: args.connections.map(|n| n as usize),
    })
}

fn told(ready: &CacheNodeReady, output: &Output) {
    for note in &ready.notes {
        output.note(note);
    }
    if output.json {
        output.json(&serde_json::json!({
            "path": ready.path, "addresses": ready.addresses, "pid": std::process::id()
        }));
        return;
    }
    let addresses: Vec<String> = ready.addresses.iter().map(ToString::to_string).collect();
    output.line(format!("{} serves at {}", ready.path.display(), addresses.join(", ")));
}

pub fn sign(args: &SignUrlArgs, output: &Output) -> Result<Exit, Failure> {
    let mut url = Url::parse(&args.url).map_err(|e| Failure::usage(format!("{}: {e}", args.url)))?;
    let path = parse(url.path()).map_err(|why| Failure::usage(format!("{}: {why}", args.url)))?;
    let access = AccessRules::read(&args.access).map_err(Failure::usage)?;
    let query = url.query().unwrap_or_default();
    if AccessRules::is_reserved(query) {
        let why = "its query has a part `expires` or `signature`, which a signed URL gets from the node's key";
        return Err(Failure::usage(format!("{}: {why}", args.url)));
    }
    let query = access.sign(&path.path, query, args.valid, SystemTime::now()).ok_or_else(|| {
        Failure::usage(format!("access file {}: it has no signing-key", args.access.display()))
            .remedy("signing-key = \"...\", at least 16 characters, in the file of the node, too")
    })?;
    url.set_query(Some(&query));
    match output.json {
        true => output.json(&serde_json::json!({ "url": url.as_str() })),
        false => output.line(url.as_str()),
    }
    Ok(Exit::Done)
}
