use super::*;

const ME: u32 = 1000;
const HALF: SharePolicy = SharePolicy { dirty: 0.5, open_files: 0.5, requests: 0.5 };

fn shares() -> Arc<Shares> {
    Shares::with(HALF, 1000, 1024, ME)
}

#[test]
fn a_user_takes_a_share_of_what_other_users_left_and_one_more_user_has_room() {
    let shares = shares();
    shares.charge(Ino(2), Some((1, 500)));
    assert_eq!((shares.room_bytes(1), shares.room_bytes(2)), (0, 250));
    assert!(shares.promise(1, 1).is_none());
    let promise = shares.promise(2, 250).unwrap();
    assert!(shares.promise(2, 1).is_none());
    assert_eq!(shares.room_bytes(3), 125);
    drop(promise);
    assert_eq!(shares.room_bytes(3), 250);
}

#[test]
fn a_file_is_charged_once_and_to_its_owner_alone() {
    let shares = shares();
    shares.charge(Ino(2), Some((1, 100)));
    shares.charge(Ino(2), Some((1, 300)));
    assert_eq!(shares.dirty_bytes(1), 300);
    shares.charge(Ino(2), Some((2, 300)));
    assert_eq!((shares.dirty_bytes(1), shares.dirty_bytes(2)), (0, 300));
    shares.charge(Ino(2), None);
    shares.charge(Ino(2), None);
    assert_eq!(shares.dirty_bytes(2), 0);
    let ledger = shares.ledger.lock();
    assert!(ledger.dirty.is_empty() && ledger.users.is_empty() && ledger.dirty_bytes == 0);
}

#[test]
fn root_and_the_mounter_have_no_share() {
    let shares = shares();
    for user in [0, ME] {
        shares.charge(Ino(2), Some((user, 1000)));
        assert!(shares.promise(user, 5000).is_some());
        assert!(!shares.must_wait(user) && !shares.is_pressed(user));
    }
}

#[test]
fn open_files_are_counted_once_each_and_descriptors_stay_for_the_daemon() {
    let shares = shares();
    // Half of 1024 is kept, and half of the rest for the first user.
    let slots: Vec<UserSlot> = (0..256).map(|n| shares.open(1, Ino(n)).unwrap()).collect();
    assert_eq!(shares.open(1, Ino(256)).unwrap_err().errno(), libc::EMFILE);
    assert!(shares.open(1, Ino(0)).is_ok(), "the same file again takes no descriptor");
    assert!(shares.open(2, Ino(0)).is_ok());
    shares.close(slots[0], Ino(0));
    assert_eq!(shares.open(1, Ino(256)).unwrap_err().errno(), libc::EMFILE);
    shares.close(slots[0], Ino(0));
    // The other user's file reduces the share by half a file.
    shares.close(slots[1], Ino(1));
    assert!(shares.open(1, Ino(256)).is_ok());
    let all = (0..2000).take_while(|n| shares.open(0, Ino(n + 10_000)).is_ok()).count() as u64;
    assert_eq!(all + 255 + 1, 1024 - DESCRIPTORS_LAST);
}

#[tokio::test]
async fn requests_beyond_the_share_wait_for_their_own_user() {
    let shares = shares();
    let mut mine: Vec<WaitingRequest> = (0..512).map(|_| shares.begin_request(1)).collect();
    assert!(shares.must_wait(1) && !shares.must_wait(2));
    let next = tokio::spawn(shares.clone().request_in_turn(1));
    tokio::task::yield_now().await;
    assert!(!next.is_finished());
    drop(mine.pop());
    let _next = tokio::time::timeout(Duration::from_secs(5), next).await.unwrap().unwrap();
    assert!(shares.must_wait(1));
}
