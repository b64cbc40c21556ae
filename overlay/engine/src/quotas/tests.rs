use forebay_policy::Policy;

use super::*;

const ANNA: FileOwner = FileOwner { uid: 1000, gid: 50 };
const BOB: FileOwner = FileOwner { uid: 1001, gid: 50 };
const EACH: &str = "[[quota]]\nuser = \"*\"\nbytes = \"1000B\"\nfiles = 2\n";

fn quotas(text: &str) -> Arc<Quotas> {
    let quotas =
        Quotas { ledger: Mutex::default(), counts: AtomicBool::new(false), is_complete: AtomicBool::new(true) };
    assert!(quotas.set_policy(&policy(text)));
    quotas.complete();
    Arc::new(quotas)
}

fn policy(text: &str) -> QuotaPolicy {
    Policy::parse(text).unwrap().quotas.clone()
}

fn file(number: u64) -> SpaceHolder {
    SpaceHolder::File(Ino(number))
}

fn by(subject: QuotaSubject, resource: QuotaResource) -> QuotaRefusal {
    QuotaRefusal { subject, resource }
}

#[test]
fn users_and_their_groups_have_what_their_quotas_allow() {
    let quotas = quotas(&format!("{EACH}[[quota]]\ngroup = \"50\"\nbytes = \"1500B\"\n"));
    quotas.charge(&file(2), Some((ANNA, 900)));
    assert_eq!((quotas.room_bytes(ANNA), quotas.room_bytes(BOB)), (100, 600));
    let promise = quotas.promise(BOB, 600, 1).unwrap();
    let anna = QuotaSubject::User(1000);
    assert_eq!(quotas.promise(BOB, 1, 0).unwrap_err(), by(QuotaSubject::Group(50), QuotaResource::Bytes));
    assert_eq!(quotas.promise(ANNA, 101, 0).unwrap_err(), by(anna, QuotaResource::Bytes));
    drop(promise);
    assert_eq!(quotas.room_bytes(BOB), 600);
    let promise = quotas.promise(ANNA, 0, 1).unwrap();
    assert_eq!(quotas.promise(ANNA, 0, 1).unwrap_err(), by(anna, QuotaResource::Files));
    drop(promise);
    // Root's files count for the group, and are not refused.
    let root = FileOwner { uid: 0, gid: 50 };
    quotas.charge(&file(3), Some((root, 700)));
    assert!(quotas.promise(root, 1 << 40, 9).is_ok());
    assert_eq!(quotas.room_bytes(BOB), 0);
    assert_eq!(quotas.wrong_sums(), [""; 0]);
}

#[test]
fn a_file_is_charged_once_and_moves_with_its_owner() {
    let quotas = quotas(EACH);
    for bytes in [100, 900, 300] {
        quotas.charge(&file(2), Some((ANNA, bytes)));
    }
    assert_eq!((quotas.room_bytes(ANNA), quotas.room_bytes(BOB)), (700, 1000));
    quotas.charge(&file(2), Some((BOB, 300)));
    assert_eq!((quotas.room_bytes(ANNA), quotas.room_bytes(BOB)), (1000, 700));
    quotas.charge(&SpaceHolder::Scratch("7".into()), Some((BOB, 200)));
    assert_eq!(quotas.room_bytes(BOB), 500);
    assert_eq!(quotas.used(by(QuotaSubject::User(1001), QuotaResource::Files)), 1);
    quotas.charge(&file(2), None);
    quotas.charge(&SpaceHolder::Scratch("7".into()), None);
    assert!(quotas.ledger.lock().accounts.is_empty() && quotas.ledger.lock().members.is_empty());
}

#[test]
fn a_soft_limit_becomes_hard_after_its_grace() {
    let quotas = quotas("[[quota]]\nuser = \"*\"\nsoft-bytes = \"100B\"\nbytes = \"1000B\"\ngrace = \"1h\"\n");
    quotas.charge(&file(2), Some((ANNA, 200)));
    assert_eq!(quotas.room_bytes(ANNA), 800);
    let anna = QuotaSubject::User(1000);
    let set = |at: u64| quotas.ledger.lock().account(anna).bytes.exceeded_unix = Some(at);
    let long_ago = unix_now() - 1800;
    set(long_ago);
    // It is charged again: that is no new begin.
    quotas.charge(&file(2), Some((ANNA, 201)));
    assert_eq!(quotas.ledger.lock().account(anna).bytes.exceeded_unix, Some(long_ago));
    assert_eq!(quotas.room_bytes(ANNA), 799);
    set(long_ago - 1800);
    assert_eq!(quotas.room_bytes(ANNA), 0);
    let error = quotas.refused(by(anna, QuotaResource::Bytes), 5, 1);
    assert!(error.is(ErrorKind::Quota) && error.to_string().contains("soft limit of 100"), "{error}");
    quotas.charge(&file(2), Some((ANNA, 100)));
    assert_eq!(quotas.room_bytes(ANNA), 900);
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
    assert!(!quotas.set_policy(&policy("[[quota]]\nuser = \"*\"\nbytes = \"950B\"\n")));
    assert_eq!(quotas.room_bytes(ANNA), 50);
    let promise = quotas.promise(ANNA, 10, 1).unwrap();
    assert!(!quotas.set_policy(&QuotaPolicy::default()));
    assert_eq!(quotas.room_bytes(ANNA), u64::MAX);
    assert!(quotas.set_policy(&policy(EACH)));
    drop(promise);
    // Until everything is counted, nothing is promised.
    assert!(!quotas.is_complete() && quotas.promise(ANNA, 1, 0).is_err());
    quotas.charge(&file(2), Some((ANNA, 400)));
    quotas.complete();
    assert_eq!(quotas.room_bytes(ANNA), 600);
    assert_eq!(quotas.wrong_sums(), [""; 0]);
}
