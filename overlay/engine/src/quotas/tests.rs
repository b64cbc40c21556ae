use QuotaShortage::{Full, Never, Promised, Uncounted};
use forebay_policy::Policy;

use super::*;

const ANNA: FileOwner = FileOwner { uid: 1000, gid: 50 };
const BOB: FileOwner = FileOwner { uid: 1001, gid: 50 };
const EACH: &str = "[[quota]]\nuser = \"*\"\nbytes = \"1000B\"\nfiles = 2\n";

fn quotas(text: &str) -> Arc<Quotas> {
    let quotas = Quotas::new();
    let count = quotas.set_policy(&policy(text)).unwrap();
    quotas.complete(count);
    Arc::new(quotas)
}

fn policy(text: &str) -> QuotaPolicy {
    Policy::parse(text).unwrap().quotas.clone()
}

fn file(number: u64) -> SpaceHolder {
    SpaceHolder::File(Ino(number))
}

fn by(subject: QuotaSubject, resource: QuotaResource, why: QuotaShortage) -> QuotaRefusal {
    QuotaRefusal { subject, resource, why }
}

#[test]
fn users_and_their_groups_have_what_their_quotas_allow() {
    let quotas = quotas(&format!("{EACH}[[quota]]\ngroup = \"50\"\nbytes = \"1500B\"\n"));
    quotas.charge(&file(2), Some((ANNA, 900)));
    assert_eq!((quotas.room_bytes(ANNA), quotas.room_bytes(BOB)), (Some(100), Some(600)));
    let promise = quotas.promise(BOB, 600, 1).unwrap();
    let anna = QuotaSubject::User(1000);
    assert_eq!(quotas.promise(BOB, 1, 0).unwrap_err(), by(QuotaSubject::Group(50), QuotaResource::Bytes, Promised));
    assert_eq!(quotas.promise(ANNA, 101, 0).unwrap_err(), by(anna, QuotaResource::Bytes, Full));
    assert_eq!(quotas.promise(ANNA, 1001, 0).unwrap_err(), by(anna, QuotaResource::Bytes, Never));
    drop(promise);
    assert_eq!(quotas.room_bytes(BOB), Some(600));
    let promise = quotas.promise(ANNA, 0, 1).unwrap();
    assert_eq!(quotas.promise(ANNA, 0, 1).unwrap_err(), by(anna, QuotaResource::Files, Promised));
    drop(promise);
    // Root's files count for the group, and are not refused.
    let root = FileOwner { uid: 0, gid: 50 };
    quotas.charge(&file(3), Some((root, 700)));
    assert!(quotas.promise(root, 1 << 40, 9).is_ok());
    assert_eq!(quotas.room_bytes(BOB), Some(0));
    assert_eq!(quotas.wrong_sums(), [""; 0]);
}

#[test]
fn a_file_is_charged_once_and_moves_with_its_owner() {
    let quotas = quotas(EACH);
    for bytes in [100, 900, 300] {
        quotas.charge(&file(2), Some((ANNA, bytes)));
    }
    assert_eq!((quotas.room_bytes(ANNA), quotas.room_bytes(BOB)), (Some(700), Some(1000)));
    quotas.charge(&file(2), Some((BOB, 300)));
    assert_eq!((quotas.room_bytes(ANNA), quotas.room_bytes(BOB)), (Some(1000), Some(700)));
    quotas.charge(&SpaceHolder::Scratch("7".into()), Some((BOB, 200)));
    assert_eq!(quotas.room_bytes(BOB), Some(500));
    assert_eq!(quotas.used(by(QuotaSubject::User(1001), QuotaResource::Files, Full)), 1);
    quotas.charge(&file(2), None);
    quotas.charge(&SpaceHolder::Scratch("7".into()), None);
    assert!(quotas.ledger.lock().accounts.is_empty() && quotas.ledger.lock().members.is_empty());
}

#[test]
fn a_soft_limit_becomes_hard_after_its_grace() {
    let quotas = quotas("[[quota]]\nuser = \"*\"\nsoft-bytes = \"100B\"\nbytes = \"1000B\"\ngrace = \"1h\"\n");
    quotas.charge(&file(2), Some((ANNA, 200)));
    assert_eq!(quotas.room_bytes(ANNA), Some(800));
    let anna = QuotaSubject::User(1000);
    let set = |at: u64| quotas.ledger.lock().account(anna).bytes.exceeded_unix = Some(at);
    let long_ago = unix_now() - 1800;
    set(long_ago);
    // It is charged again: that is no new begin.
    quotas.charge(&file(2), Some((ANNA, 201)));
    assert_eq!(quotas.ledger.lock().account(anna).bytes.exceeded_unix, Some(long_ago));
    assert_eq!(quotas.room_bytes(ANNA), Some(799));
    set(long_ago - 1800);
    assert_eq!(quotas.room_bytes(ANNA), Some(0));
    let error = quotas.refused(by(anna, QuotaResource::Bytes, Full), 5, 1);
    assert!(error.is(ErrorKind::Quota) && error.to_string().contains("soft limit of 100"), "{error}");
    quotas.charge(&file(2), Some((ANNA, 100)));
    assert_eq!(quotas.room_bytes(ANNA), Some(900));
}

#[test]
fn files_are_flushed_early_near_a_limit_and_while_a_write_waits() {
    let quotas = quotas(&format!("{EACH}[[quota]]\ngroup = \"50\"\nbytes = \"10KiB\"\n"));
    quotas.charge(&file(2), Some((ANNA, 800)));
    assert!(!quotas.is_pressed(1000) && !quotas.is_pressed(1001));
    quotas.charge(&file(2), Some((ANNA, 900)));
    assert!(quotas.is_pressed(1000) && !quotas.is_pressed(1001));
    quotas.charge(&file(3), Some((BOB, 1)));
    let waiting = quotas.wait(QuotaSubject::Group(50));
    assert!(quotas.is_pressed(1001));
    drop(waiting);
    assert!(!quotas.is_pressed(1001));
}

#[test]
fn another_policy_holds_at_once_and_the_first_one_counts_first() {
    let quotas = quotas(EACH);
    quotas.charge(&file(2), Some((ANNA, 900)));
    assert_eq!(quotas.set_policy(&policy("[[quota]]\nuser = \"*\"\nbytes = \"950B\"\n")), None);
    assert_eq!(quotas.room_bytes(ANNA), Some(50));
    let promise = quotas.promise(ANNA, 10, 1).unwrap();
    let waiting = quotas.wait(QuotaSubject::User(1000));
    assert_eq!(quotas.set_policy(&QuotaPolicy::default()), None);
    assert_eq!(quotas.room_bytes(ANNA), Some(u64::MAX));
    let first = quotas.set_policy(&policy(&EACH.replace('*', "1000"))).unwrap();
    let other = quotas.promise(ANNA, 10, 0).unwrap_err();
    assert_eq!(other.why, Uncounted);
    // Until everything is counted, users with a limit wait, and no others.
    assert_eq!((quotas.room_bytes(ANNA), quotas.room_bytes(BOB)), (None, Some(u64::MAX)));
    assert!(quotas.promise(BOB, 1 << 40, 9).is_ok());
    // A count that was overtaken by another one does not end it.
    assert_eq!(quotas.set_policy(&QuotaPolicy::default()), None);
    let second = quotas.set_policy(&policy(EACH)).unwrap();
    quotas.complete(first);
    assert!(!quotas.is_complete());
    quotas.charge(&file(2), Some((ANNA, 400)));
    quotas.complete(second);
    assert_eq!(quotas.room_bytes(ANNA), Some(600));
    // What was promised by an earlier policy is no promise of this one.
    let later = quotas.promise(ANNA, 100, 0).unwrap();
    drop((promise, waiting));
    assert_eq!(quotas.room_bytes(ANNA), Some(500));
    drop(later);
    assert_eq!(quotas.wrong_sums(), [""; 0]);
}

#[test]
fn a_quota_of_what_is_staged_counts_nothing_else() {
    let quotas = Quotas::new();
    let staged = policy("[[quota]]\nuser = \"*\"\nstaged-bytes = \"1GiB\"\n");
    assert_eq!(quotas.set_policy(&staged), None);
    assert!(!quotas.count() && quotas.is_complete());
}

#[test]
fn what_is_known_of_the_flush_is_used_for_a_moment() {
    let quotas = quotas(EACH);
    let anna = QuotaSubject::User(1000);
    quotas.charge(&file(2), Some((ANNA, 900)));
    assert_eq!(quotas.known_hope(anna), None);
    quotas.note_hope(anna, quotas.closes(), false);
    assert_eq!(quotas.known_hope(anna), Some(false));
    quotas.room_may_come();
    assert_eq!(quotas.known_hope(anna), None);
    assert_eq!(
        (quotas.dirty_files_of(anna, 9), quotas.dirty_files_of(QuotaSubject::Group(50), 9)),
        (vec![Ino(2)], vec![Ino(2)])
    );
    quotas.charge(&file(2), Some((BOB, 900)));
    assert!(quotas.dirty_files_of(anna, 9).is_empty() && quotas.ledger.lock().files.len() == 2);
}
