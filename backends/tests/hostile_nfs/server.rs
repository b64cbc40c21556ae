//! A small NFS server on a port of this machine. It answers correctly until it is given a script.
//!
//! It has a read-only tree: `good` (a file), `link` (a symlink) and `dir` with `inner` in it.

use std::collections::BTreeSet;
use std::sync::Arc;

use forebay_backends::nfs::NfsPool;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

pub const NFS: u32 = 100_003;
pub const MOUNT: u32 = 100_005;

/// Numbers of the protocol's procedures.
pub mod procedure {
    pub const MNT: u32 = 1;
    pub const GETATTR: u32 = 1;
    pub const LOOKUP: u32 = 3;
    pub const READLINK: u32 = 5;
    pub const READ: u32 = 6;
    pub const WRITE: u32 = 7;
    pub const MKDIR: u32 = 9;
    pub const READDIR: u32 = 16;
    pub const READDIRPLUS: u32 = 17;
    pub const FSSTAT: u32 = 18;
    pub const FSINFO: u32 = 19;
    pub const PATHCONF: u32 = 20;
}

pub mod status {
    pub const NOENT: u32 = 2;
    pub const READ_ONLY: u32 = 30;
    pub const NOT_SUPPORTED: u32 = 10_004;
}

pub const GOOD_BYTES: usize = 100_000;
pub const TARGET: &[u8] = b"good";

/// The content of `good`.
pub fn good_content() -> Vec<u8> {
    (0..GOOD_BYTES).map(|n| ((n * 31) >> 3) as u8).collect()
}

/// One call as received.
pub struct RpcCall {
    pub number: u32,
    pub program: u32,
    pub procedure: u32,
    pub args: Vec<u8>,
}

impl RpcCall {
    pub fn is(&self, procedure: u32) -> bool {
        self.program == NFS && self.procedure == procedure
    }

    /// The number so many bytes before the end of the arguments.
    pub fn word_from_end(&self, bytes: usize) -> u32 {
        let at = self.args.len() - bytes;
        u32::from_be_bytes(self.args[at..at + 4].try_into().unwrap())
    }

    /// The number of bytes in a WRITE: after the handle and the offset.
    pub fn write_bytes(&self) -> u32 {
        u32::from_be_bytes(self.args[20..24].try_into().unwrap())
    }

    /// The cookie of a READDIR or READDIRPLUS: after the handle, which has eight bytes.
    pub fn cookie(&self) -> u64 {
        u64::from_be_bytes(self.args[12..20].try_into().unwrap())
    }
}

/// The reply to a call.
pub enum RpcReply {
    /// The call was accepted and carried out; these are its results.
    Results(Xdr),
    /// These bytes, unchanged.
    Raw(Vec<u8>),
    /// Like `Raw`; then the connection is closed.
    Last(Vec<u8>),
    /// These bytes, repeated without end.
    Endless(Vec<u8>),
    Silence,
}

/// Words in the protocol's encoding.
#[derive(Default, Clone)]
pub struct Xdr(pub Vec<u8>);

impl Xdr {
    pub fn word(mut self, word: u32) -> Self {
        self.0.extend(word.to_be_bytes());
        self
    }

    pub fn words(self, words: &[u32]) -> Self {
        words.iter().fold(self, |xdr, word| xdr.word(*word))
    }

    pub fn long(mut self, long: u64) -> Self {
        self.0.extend(long.to_be_bytes());
        self
    }

    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self = self.word(bytes.len() as u32);
        self.0.extend(bytes);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub fn attributes(self, of: &NfsAttributes) -> Self {
        self.words(&[of.kind, of.mode, 1, of.owner, of.owner])
            .long(of.size)
            .long(of.size)
            .words(&[0, 0])
            .long(1)
            .long(of.id)
            .words(&[1_600_000_000, of.nanos, 1_600_000_000, of.nanos, 1_600_000_000, of.nanos])
    }

    /// Attributes at a place where the protocol makes them optional.
    pub fn some_attributes(self, of: &NfsAttributes) -> Self {
        self.word(1).attributes(of)
    }

    /// An entry of READDIRPLUS.
    pub fn entry(self, name: &[u8], cookie: u64, of: &NfsAttributes) -> Self {
        self.word(1).long(of.id).bytes(name).long(cookie).some_attributes(of).word(0)
    }

    /// The beginning of the results of READDIRPLUS.
    pub fn page() -> Self {
        Self::default().words(&[0, 0]).long(0)
    }

    /// The end of the results of READDIRPLUS.
    pub fn end(self, is_last: bool) -> Self {
        self.words(&[0, u32::from(is_last)])
    }

    /// Makes a record of the words.
    pub fn record(self) -> Vec<u8> {
        [(self.0.len() as u32 | 0x8000_0000).to_be_bytes().to_vec(), self.0].concat()
    }
}

/// The head of an answer to an accepted call.
pub fn accepted(number: u32) -> Xdr {
    Xdr::default().words(&[number, 1, 0, 0, 0, 0])
}

#[derive(Clone, Copy)]
pub struct NfsAttributes {
    pub kind: u32,
    pub mode: u32,
    pub owner: u32,
    pub size: u64,
    pub id: u64,
    pub nanos: u32,
}

pub const ROOT: NfsAttributes = NfsAttributes { kind: 2, mode: 0o755, owner: 0, size: 4096, id: 1, nanos: 0 };
pub const DIR: NfsAttributes = NfsAttributes { id: 2, ..ROOT };
pub const GOOD: NfsAttributes = NfsAttributes { kind: 1, mode: 0o644, size: GOOD_BYTES as u64, id: 3, ..ROOT };
pub const LINK: NfsAttributes = NfsAttributes { kind: 5, mode: 0o777, size: TARGET.len() as u64, id: 4, ..ROOT };
pub const INNER: NfsAttributes = NfsAttributes { size: 0, id: 5, ..GOOD };
const OBJECTS: [NfsAttributes; 5] = [ROOT, DIR, GOOD, LINK, INNER];

pub fn handle(of: &NfsAttributes) -> [u8; 8] {
    of.id.to_be_bytes()
}

fn children(dir: u64) -> &'static [(&'static [u8], NfsAttributes)] {
    match dir {
        1 => &[(b"dir", DIR), (b"good", GOOD), (b"link", LINK)],
        2 => &[(b"inner", INNER)],
        _ => &[],
    }
}

/// Decodes arguments.
struct Arguments<'a>(&'a [u8]);

impl Arguments<'_> {
    fn word(&mut self) -> u32 {
        let (word, rest) = self.0.split_at(4);
        self.0 = rest;
        u32::from_be_bytes(word.try_into().unwrap())
    }

    fn long(&mut self) -> u64 {
        (u64::from(self.word()) << 32) | u64::from(self.word())
    }

    fn bytes(&mut self) -> Vec<u8> {
        let length = self.word() as usize;
        let (bytes, rest) = self.0.split_at(length.next_multiple_of(4));
        self.0 = rest;
        bytes[..length].to_vec()
    }

    fn object(&mut self) -> NfsAttributes {
        let handle = self.bytes();
        OBJECTS.into_iter().find(|object| self::handle(object)[..] == handle[..]).expect("a handle that was given out")
    }
}

/// The results of a well-behaved server.
pub fn good(request: &RpcCall) -> Xdr {
    let (mut args, xdr) = (Arguments(&request.args), Xdr::default());
    if request.program == MOUNT {
        return match request.procedure {
            procedure::MNT if args.bytes() == b"/pool" => xdr.word(0).bytes(&handle(&ROOT)).words(&[1, 1]),
            procedure::MNT => xdr.word(status::NOENT),
            _ => xdr.word(0),
        };
    }
    match request.procedure {
        procedure::GETATTR => xdr.word(0).attributes(&args.object()),
        procedure::LOOKUP => {
            let (dir, name) = (args.object(), args.bytes());
            match children(dir.id).iter().find(|(child, _)| child[..] == name[..]) {
                Some((_, found)) => xdr.word(0).bytes(&handle(found)).some_attributes(found).word(0),
                None => xdr.words(&[status::NOENT, 0]),
            }
        }
        procedure::READLINK => xdr.words(&[0, 0]).bytes(TARGET),
        procedure::READ => {
            let (file, offset, count) = (args.object(), args.long() as usize, args.word() as usize);
            let content = good_content();
            let end = (offset + count).min(content.len());
            let part = &content[offset.min(end)..end];
            let xdr = xdr.word(0).some_attributes(&file);
            xdr.words(&[part.len() as u32, u32::from(end == content.len())]).bytes(part)
        }
        procedure::READDIR => {
            let entries = children(args.object().id).iter().zip(1..);
            let entry = |xdr: Xdr, ((name, of), cookie): (&(&[u8], NfsAttributes), _)| {
                xdr.word(1).long(of.id).bytes(name).long(cookie)
            };
            entries.fold(Xdr::page(), entry).end(true)
        }
        procedure::READDIRPLUS => {
            let entries = children(args.object().id).iter().zip(1..);
            entries.fold(Xdr::page(), |xdr, ((name, of), cookie)| xdr.entry(name, cookie, of)).end(true)
        }
        procedure::FSSTAT => {
            xdr.words(&[0, 0]).long(1 << 40).long(1 << 39).long(1 << 39).long(9).long(9).long(9).word(0)
        }
        procedure::FSINFO => {
            let sizes = [1 << 20, 1 << 20, 4096, 1 << 20, 1 << 20, 4096, 1 << 20];
            xdr.words(&[0, 0]).words(&sizes).long(1 << 50).words(&[0, 1]).word(2)
        }
        procedure::PATHCONF => xdr.words(&[0, 0, 32, 255, 1, 1, 0, 1]),
        // All changes: refused, without the attributes before and after.
        _ => xdr.words(&[status::READ_ONLY, 0, 0]),
    }
}

type Script = Arc<dyn Fn(&RpcCall) -> Option<RpcReply> + Send + Sync>;

/// The server. It ends when this value is dropped.
pub struct HostileServer {
    port: u16,
    script: Arc<Mutex<Option<Script>>>,
    _tasks: JoinSet<()>,
}

impl HostileServer {
    pub async fn start() -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let script = Arc::new(Mutex::new(None));
        let mut tasks = JoinSet::new();
        tasks.spawn({
            let script = Arc::clone(&script);
            async move {
                let mut connections = JoinSet::new();
                while let Ok((client, _)) = listener.accept().await {
                    // A connection ends with an error.
                    connections.spawn(serve(client, Arc::clone(&script)));
                    while connections.try_join_next().is_some() {}
                }
            }
        });
        Self { port, script, _tasks: tasks }
    }

    pub fn url(&self) -> String {
        format!("nfs://127.0.0.1/pool?nfsport={0}&mountport={0}", self.port)
    }

    pub async fn open(&self) -> NfsPool {
        NfsPool::open(&self.url()).await.unwrap()
    }

    /// Answers calls by this script from now on; a call for which the script returns `None` is answered correctly.
    pub fn misbehave(&self, script: impl Fn(&RpcCall) -> Option<RpcReply> + Send + Sync + 'static) {
        *self.script.lock() = Some(Arc::new(script));
    }

    pub fn behave(&self) {
        *self.script.lock() = None;
    }
}

async fn serve(mut client: TcpStream, script: Arc<Mutex<Option<Script>>>) -> std::io::Result<()> {
    loop {
        let length = client.read_u32().await? & 0x7fff_ffff;
        let mut record = vec![0; length as usize];
        client.read_exact(&mut record).await?;
        let mut head = Arguments(&record);
        let words: Vec<_> = (0..6).map(|_| head.word()).collect();
        for _credentials_and_verifier in 0..2 {
            head.word();
            head.bytes();
        }
        let request = RpcCall { number: words[0], program: words[3], procedure: words[5], args: head.0.to_vec() };
        let script = script.lock().clone();
        let answer = script.and_then(|script| script(&request)).unwrap_or_else(|| RpcReply::Results(good(&request)));
        match answer {
            RpcReply::Results(results) => {
                let whole = Xdr([accepted(request.number).0, results.0].concat());
                client.write_all(&whole.record()).await?;
            }
            RpcReply::Raw(bytes) => client.write_all(&bytes).await?,
            RpcReply::Last(bytes) => return client.write_all(&bytes).await,
            RpcReply::Endless(bytes) => loop {
                client.write_all(&bytes).await?;
            },
            RpcReply::Silence => {}
        }
    }
}

/// Names in the order of the server's root.
pub fn names_of_root() -> BTreeSet<Vec<u8>> {
    children(1).iter().map(|(name, _)| name.to_vec()).collect()
}
