//! What a node knows of the others, and its counters.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use forebay_api::peers::{PeerMember, PeerState, PeersStatus};
use forebay_backends::store::no_http_client;
use forebay_backends::{PoolPath, Version};
use forebay_cluster::{
    DEALT_MAX, FileKey, FileOwners, Lender, Member, MemberList, MemberSource, Moment, NodeId, PassOver, PassOvers,
    PeerPatience, RANGE_BYTES, RangeKey, Ranked, Role, Roster, Suspicions, UNSETTLED, range_of, ranges_of,
};
use lru::LruCache;
use parking_lot::Mutex;

use crate::announcements::Announcements;
use crate::settings::PeerSettings;

/// Ranges of files whose owners are remembered, some 40 bytes for each: those of 16 files that are as large as any that is dealt
/// out.
const RANGES_REMEMBERED: usize = 1 << 20;
const _: () = assert!(DEALT_MAX as usize <= RANGES_REMEMBERED);
/// Files by which the share of each member is estimated.
const SHARE_SAMPLES: u32 = 4096;
/// How long the connection to a node may take. A node in one network answers within milliseconds.
const CONNECT_WITHIN: Duration = Duration::from_millis(500);
/// Less than the time after which the door ends an idle connection.
const IDLE: Duration = Duration::from_secs(10);
/// Idle connections to one node: as many as one reader has requests at once.
const IDLE_CONNECTIONS: usize = 16;

/// The cluster as one node sees it. The client and the door share it.
pub struct Peers {
    /// Names the pool on all nodes.
    pool: String,
    pub(crate) cluster: ArcSwap<ClusterView>,
    /// Held while `cluster` is replaced.
    members: Mutex<MemberList>,
    pub(crate) http: reqwest::Client,
    began: Instant,
    pub(crate) state: Mutex<PeersState>,
    /// Ranges that this node reads from the pool for others.
    pub(crate) for_others: RangesInUse,
    /// Ranges for which this node asks others.
    pub(crate) from_others: RangesInUse,
    read_bytes: AtomicU64,
    given_bytes: AtomicU64,
    pub(crate) announcements: Mutex<Announcements>,
    /// Paths told, counted once for each node; and paths that a node was not told.
    pub(crate) announced: AtomicU64,
    pub(crate) announcements_lost: AtomicU64,
}

/// The settings, and the members at one moment.
pub(crate) struct ClusterView {
    pub this: NodeId,
    pub settings: PeerSettings,
    pub roster: Roster,
    /// Two nodes with the same one agree on all owners.
    pub fingerprint: u64,
}

impl ClusterView {
    fn new(this: NodeId, settings: PeerSettings, roster: Roster) -> Self {
        let placing = serde_json::to_vec(&settings.placing).unwrap_or_default();
        let fingerprint = roster.fingerprint() ^ u64::from(crc32c::crc32c(&placing));
        if settings.placing.asks(&this) && settings.placing.eligible(&roster).is_empty() {
            tracing::warn!(
                placement = settings.placing.placement.as_str(),
                "no member may own content: all comes from the pool"
            );
        }
        Self { this, settings, roster, fingerprint }
    }
}

/// What changes with each request.
pub(crate) struct PeersState {
    pub suspicions: Suspicions,
    pub pass_overs: PassOvers,
    pub patience: PeerPatience,
    pub lender: Lender,
    /// Of files with several ranges, by file, number of its ranges, and fingerprint of the members.
    owners: LruCache<(FileKey, u64, u64), Arc<FileOwners>>,
    /// The sum of the ranges of `owners`.
    owned_ranges: usize,
    traffic: HashMap<NodeId, PeerTraffic>,
    /// Members changed, or one failed, a short while ago.
    unsettled_until: Moment,
}

#[derive(Debug, Clone, Default)]
struct PeerTraffic {
    read_bytes: u64,
    given_bytes: u64,
    passed_over: PassOvers,
    last: Option<PassOver>,
    /// The fingerprint of the members that it sees.
    members: Option<u64>,
}

/// The ranked members of a range, and the roster in which they have their seats.
pub(crate) struct RangeOwners {
    pub cluster: Arc<ClusterView>,
    pub key: RangeKey,
    pub ranked: Ranked,
}

impl Peers {
    /// `pool`: the URL of the pool, the same on all nodes.
    ///
    /// # Errors
    /// The HTTP client cannot be made.
    pub fn new(pool: String, settings: PeerSettings) -> Result<Arc<Self>, String> {
        let http = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_WITHIN)
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(IDLE_CONNECTIONS)
            .http1_only()
            .build()
            .map_err(|e| no_http_client(&e))?;
        let state = PeersState {
            suspicions: Suspicions::default(),
            pass_overs: PassOvers::default(),
            patience: PeerPatience::default(),
            lender: Lender::new(settings.own.id.clone()),
            owners: LruCache::unbounded(),
            owned_ranges: 0,
            traffic: HashMap::new(),
            unsettled_until: UNSETTLED,
        };
        let mut members = MemberList::default();
        members.replace(MemberSource::Static, settings.members.clone());
        let view = ClusterView::new(settings.own.id.clone(), settings, members.roster());
        Ok(Arc::new(Self {
            pool,
            cluster: ArcSwap::from_pointee(view),
            members: Mutex::new(members),
            http,
            began: Instant::now(),
            state: Mutex::new(state),
            for_others: RangesInUse::default(),
            from_others: RangesInUse::default(),
            read_bytes: AtomicU64::new(0),
            given_bytes: AtomicU64::new(0),
            announcements: Mutex::default(),
            announced: AtomicU64::new(0),
            announcements_lost: AtomicU64::new(0),
        }))
    }

    /// Takes other members, placement and token. This node, its address and etcd stay. A file that is of another node is not
    /// taken: its list need not name this one.
    pub fn reload(&self, settings: PeerSettings) {
        let before = &self.cluster.load().settings;
        let (is, says) = (&before.own.id, &settings.own.id);
        if is != says {
            tracing::error!(
                "the peers file says node = \"{says}\", and this node is \"{is}\": all stays as it is. Write node = \"{is}\", or \
                 unmount and mount again to be \"{says}\""
            );
            return;
        }
        let stays = (&before.own, before.listen, &before.etcd) == (&settings.own, settings.listen, &settings.etcd);
        if !stays {
            tracing::warn!(
                "the peers file names another address, role or etcd for this node: they change with the next mount"
            );
        }
        let (own, etcd) = (before.own.clone(), before.etcd.clone());
        let settings = PeerSettings { own, listen: before.listen, etcd, ..settings };
        let mut members = self.members.lock();
        members.replace(MemberSource::Static, settings.members.clone());
        self.show(&members, settings);
    }

    /// Takes what a source says now for all that it says.
    pub(crate) fn take_members(&self, source: MemberSource, all: Vec<Member>) {
        let mut members = self.members.lock();
        if members.replace(source, all) {
            let settings = self.cluster.load().settings.clone();
            self.show(&members, settings);
        }
    }

    fn show(&self, members: &MemberList, settings: PeerSettings) {
        let before = self.cluster.load_full();
        let roster = members.roster();
        let changed = roster.fingerprint() != before.roster.fingerprint();
        self.cluster.store(Arc::new(ClusterView::new(before.this.clone(), settings, roster.clone())));
        let mut state = self.state.lock();
        state.owners.clear();
        state.owned_ranges = 0;
        if changed {
            state.unsettled_until = self.now() + UNSETTLED;
            state.suspicions.retain(|id| roster.get(id).is_some());
            state.traffic.retain(|id, _| roster.get(id).is_some());
            state.lender.retain(|id| roster.get(id).is_some());
            tracing::info!(members = roster.len(), "the members have changed");
        }
    }

    pub(crate) fn now(&self) -> Moment {
        self.began.elapsed()
    }

    pub(crate) fn file_key(&self, path: &PoolPath) -> FileKey {
        FileKey::of(&self.pool, path.as_bytes())
    }

    /// Returns the ranked members of the range in which a byte of a version is.
    pub(crate) fn owners(&self, file: FileKey, version: &Version, offset: u64) -> RangeOwners {
        let cluster = self.cluster.load_full();
        let owners = self.file_owners(&cluster, file, version);
        let key = RangeKey { file, index: range_of(offset) };
        let ranked = owners.ranked(&cluster.roster, key.index);
        RangeOwners { cluster, key, ranked }
    }

    /// Returns the ranges of a version of which this node is the first owner, those that follow each other as one.
    pub(crate) fn first_owned(&self, path: &PoolPath, version: &Version) -> Vec<Range<u64>> {
        let cluster = self.cluster.load_full();
        let Some(this) = cluster.roster.seat(&cluster.this) else { return Vec::new() };
        let owners = self.file_owners(&cluster, self.file_key(path), version);
        let mut owned: Vec<Range<u64>> = Vec::new();
        for index in 0..ranges_of(version.size()) {
            if owners.ranked(&cluster.roster, index).first() != Some(&this) {
                continue;
            }
            let range = index * RANGE_BYTES..version.size().min((index + 1) * RANGE_BYTES);
            match owned.last_mut().filter(|last| last.end == range.start) {
                Some(last) => last.end = range.end,
                None => owned.push(range),
            }
        }
        owned
    }

    fn file_owners(&self, cluster: &ClusterView, file: FileKey, version: &Version) -> Arc<FileOwners> {
        let ranges = ranges_of(version.size());
        let wanted = (file, ranges, cluster.fingerprint);
        let known = self.state.lock().owners.get(&wanted).cloned();
        known.unwrap_or_else(|| {
            let eligible = cluster.settings.placing.eligible(&cluster.roster);
            let owners = Arc::new(FileOwners::of(&cluster.roster, eligible, file, ranges));
            self.state.lock().remember(wanted, &owners);
            owners
        })
    }

    pub(crate) fn is_unsettled(&self) -> bool {
        self.now() < self.state.lock().unsettled_until
    }

    pub(crate) fn note_read(&self, from: &NodeId, bytes: u64) {
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.state.lock().traffic.entry(from.clone()).or_default().read_bytes += bytes;
    }

    pub(crate) fn note_given(&self, to: &NodeId, bytes: u64) {
        self.given_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.state.lock().of_member(to, self).given_bytes += bytes;
    }

    pub(crate) fn note_passed_over(&self, peer: &NodeId, why: PassOver) {
        let now = self.now();
        let mut state = self.state.lock();
        let failed = matches!(why, PassOver::Gone | PassOver::Slow | PassOver::Damaged);
        if failed && !state.suspicions.is_suspected(peer) {
            state.unsettled_until = now + UNSETTLED;
        }
        let traffic = state.traffic.entry(peer.clone()).or_default();
        traffic.passed_over.count(why);
        traffic.last = Some(why);
    }

    /// A node asked, and sees members with this fingerprint.
    pub(crate) fn note_members(&self, peer: &NodeId, fingerprint: u64) {
        if self.cluster.load().roster.get(peer).is_some() {
            self.state.lock().traffic.entry(peer.clone()).or_default().members = Some(fingerprint);
        }
    }

    /// Returns what operators see.
    pub fn status(&self) -> PeersStatus {
        let cluster = self.cluster.load_full();
        let shares = self.shares(&cluster);
        let of_sources: HashMap<NodeId, Vec<MemberSource>> =
            self.members.lock().iter().map(|(member, sources)| (member.id.clone(), sources)).collect();
        let state = self.state.lock();
        let own = cluster.fingerprint;
        let member = |(seat, member): (usize, &Member)| {
            let traffic = state.traffic.get(&member.id).cloned().unwrap_or_default();
            let peer_state = match &member.id {
                id if *id == cluster.this => PeerState::This,
                id if state.suspicions.is_suspected(id) => PeerState::Suspected,
                _ => PeerState::Trusted,
            };
            PeerMember {
                node: member.id.to_string(),
                address: member.address.clone(),
                is_cache: member.role == Role::Cache,
                sources: of_sources.get(&member.id).cloned().unwrap_or_default(),
                state: peer_state,
                share: shares.get(seat).copied().unwrap_or_default(),
                read_bytes: traffic.read_bytes,
                given_bytes: traffic.given_bytes,
                passed_over: reasons(&traffic.passed_over),
                last_passed_over: traffic.last,
                sees_other_members: traffic.members.is_some_and(|members| members != own),
            }
        };
        PeersStatus {
            node: cluster.this.to_string(),
            listen: cluster.settings.listen,
            placement: cluster.settings.placing.placement,
            members: cluster.roster.members().iter().enumerate().map(member).collect(),
            read_bytes: self.read_bytes.load(Ordering::Relaxed),
            given_bytes: self.given_bytes.load(Ordering::Relaxed),
            passed_over: reasons(&state.pass_overs),
            announced: self.announced.load(Ordering::Relaxed),
            announcements_lost: self.announcements_lost.load(Ordering::Relaxed),
        }
    }

    /// Returns the share of all ranges that each seat owns first, 0 to 1.
    fn shares(&self, cluster: &ClusterView) -> Vec<f64> {
        let roster = &cluster.roster;
        let eligible = cluster.settings.placing.eligible(roster);
        let mut owned = vec![0_u32; roster.len()];
        for sample in 0..SHARE_SAMPLES {
            let file = FileKey::of(&self.pool, &sample.to_le_bytes());
            let ranked = FileOwners::of(roster, eligible.clone(), file, 1).ranked(roster, 0);
            if let Some(first) = ranked.first() {
                owned[*first as usize] += 1;
            }
        }
        owned.into_iter().map(|count| f64::from(count) / f64::from(SHARE_SAMPLES)).collect()
    }
}

impl PeersState {
    fn remember(&mut self, file: (FileKey, u64, u64), owners: &Arc<FileOwners>) {
        // Where the scores alone decide, the owners of a range are found as fast as they are remembered.
        let dealt = owners.most_owned().map_or(0, |_| file.1 as usize);
        if dealt == 0 || self.owners.contains(&file) {
            return;
        }
        self.owners.put(file, owners.clone());
        self.owned_ranges += dealt;
        while self.owned_ranges > RANGES_REMEMBERED
            && let Some(((_, ranges, _), _)) = self.owners.pop_lru()
        {
            self.owned_ranges -= ranges as usize;
        }
    }

    /// Returns the traffic of a member. Others are counted together under the name of this node: their number has no bound.
    fn of_member(&mut self, id: &NodeId, peers: &Peers) -> &mut PeerTraffic {
        let cluster = peers.cluster.load();
        let id = if cluster.roster.get(id).is_some() { id } else { &cluster.this };
        self.traffic.entry(id.clone()).or_default()
    }
}

fn reasons(pass_overs: &PassOvers) -> Vec<(PassOver, u64)> {
    pass_overs.iter().collect()
}

/// Ranges of files with which something is being done.
#[derive(Debug, Default)]
pub(crate) struct RangesInUse(Arc<Mutex<HashMap<FileKey, Vec<Range<u64>>>>>);

/// While this lives, its range is in use.
#[derive(Debug)]
pub(crate) struct RangeInUse {
    all: Arc<Mutex<HashMap<FileKey, Vec<Range<u64>>>>>,
    file: FileKey,
    range: Range<u64>,
}

impl RangesInUse {
    pub fn begin(&self, file: FileKey, range: Range<u64>) -> RangeInUse {
        self.0.lock().entry(file).or_default().push(range.clone());
        RangeInUse { all: self.0.clone(), file, range }
    }

    /// Returns whether a part of a range is in use.
    pub fn overlaps(&self, file: FileKey, range: &Range<u64>) -> bool {
        let all = self.0.lock();
        let overlaps = |other: &Range<u64>| other.start < range.end && range.start < other.end;
        all.get(&file).is_some_and(|ranges| ranges.iter().any(overlaps))
    }
}

impl Drop for RangeInUse {
    fn drop(&mut self) {
        let mut all = self.all.lock();
        let Some(ranges) = all.get_mut(&self.file) else { return };
        if let Some(at) = ranges.iter().position(|range| *range == self.range) {
            ranges.swap_remove(at);
        }
        if ranges.is_empty() {
            all.remove(&self.file);
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_backends::Time;
    use forebay_cluster::Placing;

    use super::*;

    fn node(this: &str, members: &[&str]) -> Arc<Peers> {
        let member = |name: &str| Member {
            id: NodeId::new(name).unwrap(),
            address: "127.0.0.1:7410".into(),
            role: Role::Compute,
        };
        let settings = PeerSettings {
            own: member(this),
            listen: "127.0.0.1:7410".parse().unwrap(),
            token: "0123456789abcdef".into(),
            placing: Placing::default(),
            members: members.iter().map(|name| member(name)).collect(),
            etcd: None,
        };
        Peers::new("pool".into(), settings).unwrap()
    }

    #[test]
    fn each_byte_has_one_first_owner() {
        let names = ["n1", "n2", "n3"];
        let nodes = names.map(|this| node(this, &names));
        for size in [0, 1, RANGE_BYTES, RANGE_BYTES + 1, 40 * RANGE_BYTES + 7] {
            for name in ["a", "dir/b", "c"] {
                let version =
                    Version::Tag { etag: "e".into(), id: String::new(), size, mtime: Time { secs: 1, nanos: 0 } };
                let path = PoolPath::parse(name).unwrap();
                let owned = nodes.each_ref().map(|node| node.first_owned(&path, &version));
                let mut all: Vec<_> = owned.iter().flatten().cloned().collect();
                all.sort_by_key(|range| range.start);
                assert_eq!((all.first().unwrap().start, all.last().unwrap().end), (0, size), "{all:?}");
                assert!(all.windows(2).all(|pair| pair[0].end == pair[1].start), "{all:?}");
                assert!(size < 40 * RANGE_BYTES || owned.iter().all(|owned| !owned.is_empty()), "{owned:?}");
            }
        }
    }

    /// Otherwise, each request for a chunk of the file would deal it out again.
    #[test]
    fn what_is_dealt_out_is_remembered() {
        let node = node("n1", &["n1", "n2", "n3"]);
        let cluster = node.cluster.load_full();
        for ranges in [2, 1000, DEALT_MAX, DEALT_MAX + 1, 1 << 22] {
            let time = Time { secs: 1, nanos: 0 };
            let size = ranges * RANGE_BYTES;
            let version = Version::Tag { etag: "e".into(), id: String::new(), size, mtime: time };
            let owners = |name: &[u8]| node.file_owners(&cluster, FileKey::of("pool", name), &version);
            let (first, second) = (owners(b"a"), owners(b"b"));
            if first.most_owned().is_some() {
                assert!(Arc::ptr_eq(&first, &owners(b"a")) && Arc::ptr_eq(&second, &owners(b"b")), "{ranges}");
            }
        }
        assert!(node.state.lock().owned_ranges <= RANGES_REMEMBERED);
    }

    #[test]
    fn a_peers_file_of_another_node_is_not_taken() {
        let node = node("n1", &["n1", "n2"]);
        let mut other = self::node("other", &["other", "n2", "n3"]).cluster.load().settings.clone();
        node.reload(other.clone());
        let members = |node: &Peers| node.status().members.into_iter().map(|member| member.node).collect::<Vec<_>>();
        assert_eq!((node.status().node.as_str(), members(&node)), ("n1", vec!["n1".to_owned(), "n2".to_owned()]));
        other.own.id = NodeId::new("n1").unwrap();
        other.members[0].id = other.own.id.clone();
        node.reload(other);
        assert_eq!(members(&node), ["n1", "n2", "n3"]);
    }

    #[test]
    fn a_range_is_in_use_until_its_last_user_ends() {
        let ranges = RangesInUse::default();
        let file = FileKey::of("pool", b"a");
        let (first, second) = (ranges.begin(file, 0..10), ranges.begin(file, 0..10));
        assert!(ranges.overlaps(file, &(9..20)) && !ranges.overlaps(file, &(10..20)));
        drop(first);
        assert!(ranges.overlaps(file, &(0..1)));
        drop(second);
        assert!(!ranges.overlaps(file, &(0..10)) && ranges.0.lock().is_empty());
    }
}
