//! The decorators: without configuration they change nothing; with it, they do what it says.

mod common;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use forebay_backends::decorators::{CallKind, CallLimits, Deadline, Fault, FaultMoment, Metrics, Odds, Throttle};
use forebay_backends::memory::MemoryPool;
use forebay_backends::{ErrorKind, Expected, Part, Piece, Pool, PoolPath, Result, Side, Stat};
use futures::{StreamExt, TryStreamExt, stream};
use tokio::time::Instant;

use common::{assert_conforms, attrs, path, pieces};

const PATIENT: CallLimits = CallLimits {
    metadata: Duration::from_secs(600),
    data: Duration::from_secs(600),
    copies: Duration::from_secs(600),
    min_bytes_per_second: 1 << 20,
};

fn memory() -> Arc<MemoryPool> {
    Arc::new(MemoryPool::new())
}

async fn put(pool: &dyn Pool, name: &str, bytes: usize) -> Result<Stat> {
    let piece = Piece { offset: 0, data: Bytes::from(vec![7; bytes]) };
    let content = stream::iter([Ok(piece)]).boxed();
    pool.put(&path(name), bytes as u64, content, &attrs(), &Expected::Anything).await
}

mod neutral {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn throttle_conforms() {
        assert_conforms(Arc::new(Throttle::new(memory(), None, Duration::ZERO))).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn fault_conforms() {
        assert_conforms(Arc::new(Fault::new(memory(), 1))).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn deadline_conforms() {
        assert_conforms(Arc::new(Deadline::new(memory(), PATIENT))).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn metrics_conforms() {
        assert_conforms(Arc::new(Metrics::new(memory()))).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn all_of_them_together_conform() {
        let pool = Arc::new(Throttle::new(memory(), None, Duration::ZERO));
        let pool = Arc::new(Fault::new(pool, 1));
        let pool = Arc::new(Metrics::new(pool));
        assert_conforms(Arc::new(Deadline::new(pool, PATIENT))).await;
    }
}

mod throttle {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_call_takes_its_latency_and_its_bytes() {
        let pool = Throttle::new(memory(), Some(1_000_000), Duration::from_millis(50));
        let start = Instant::now();
        let stat = put(&pool, "f", 2_000_000).await.unwrap();
        assert_eq!(start.elapsed().as_millis(), 2_050);
        let start = Instant::now();
        pool.read(&path("f"), &stat.version, 500_000..u64::MAX).await.unwrap();
        assert_eq!(start.elapsed().as_millis(), 1_550);
        let start = Instant::now();
        pool.stat(&path("f")).await.unwrap();
        assert_eq!(start.elapsed().as_millis(), 50);
    }

    #[tokio::test(start_paused = true)]
    async fn calls_at_the_same_time_share_bandwidth_but_not_latency() {
        let pool = Throttle::new(memory(), Some(1_000_000), Duration::from_secs(1));
        let stat = put(&pool, "f", 1_000_000).await.unwrap();
        let start = Instant::now();
        let (read, written) = tokio::join!(
            async {
                pool.read(&path("f"), &stat.version, 0..1_000_000).await.unwrap();
                start.elapsed().as_secs_f64()
            },
            async {
                put(&pool, "g", 1_000_000).await.unwrap();
                start.elapsed().as_secs_f64()
            }
        );
        // Each transfer has one second of latency. Then both share one link for two megabytes, and neither waits for
        // the other.
        assert!((2.7..=3.01).contains(&read), "the read took {read} s");
        assert!((2.7..=3.01).contains(&written), "the write took {written} s");
        assert!((2.99..=3.01).contains(&read.max(written)), "both took {read} s and {written} s");
    }

    #[tokio::test(start_paused = true)]
    async fn holes_cost_no_bandwidth() {
        let pool = Throttle::new(memory(), Some(1_000), Duration::ZERO);
        let start = Instant::now();
        pool.put(&path("f"), 1 << 30, pieces(&[(500, "0123456789")]), &attrs(), &Expected::Absent).await.unwrap();
        assert_eq!(start.elapsed().as_millis(), 10);
    }
}

mod deadline {
    use super::*;

    const LIMITS: CallLimits = CallLimits {
        metadata: Duration::from_secs(2),
        data: Duration::from_secs(5),
        copies: Duration::from_secs(2),
        min_bytes_per_second: 1_000,
    };

    #[tokio::test(start_paused = true)]
    async fn a_pool_that_hangs_times_out_by_kind_of_call() {
        let fault = Arc::new(Fault::new(memory(), 1));
        let stat = put(&*fault, "some-name", 3_000).await.unwrap();
        let pool = Deadline::new(Arc::clone(&fault) as Arc<dyn Pool>, LIMITS);
        fault.set_hanging(true);
        let start = Instant::now();
        let error = pool.stat(&path("some-name")).await.unwrap_err();
        assert_eq!(start.elapsed().as_secs_f64().round(), 2.0);
        assert_eq!((error.kind(), error.side()), (ErrorKind::Timeout, Side::Pool));
        assert!(error.to_string().contains("stat /some-name"), "{error}");
        // The limit: five seconds, and one for each 1,000 bytes.
        let start = Instant::now();
        let error = pool.read(&path("some-name"), &stat.version, 0..u64::MAX).await.unwrap_err();
        assert_eq!(start.elapsed().as_secs_f64().round(), 8.0);
        assert!(error.is(ErrorKind::Timeout));
        let start = Instant::now();
        let error = put(&pool, "other", 1_000).await.unwrap_err();
        assert_eq!(start.elapsed().as_secs_f64().round(), 6.0);
        assert!(error.is(ErrorKind::Timeout));
        fault.set_hanging(false);
        assert_eq!(pool.stat(&path("some-name")).await.unwrap(), stat);
    }

    #[tokio::test(start_paused = true)]
    async fn each_page_of_a_listing_has_its_own_deadline() {
        let fault = Arc::new(Fault::new(memory(), 1));
        put(&*fault, "f", 1).await.unwrap();
        let pool = Deadline::new(Arc::clone(&fault) as Arc<dyn Pool>, LIMITS);
        let mut listing = pool.list(&PoolPath::root()).await.unwrap();
        fault.set_hanging(true);
        let error = listing.next().await.unwrap().unwrap_err();
        assert!(error.is(ErrorKind::Timeout));
        assert!(listing.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_pool_within_its_limits_is_let_be() {
        let slow = Arc::new(Throttle::new(memory(), Some(2_000), Duration::from_secs(1)));
        let pool = Deadline::new(slow, LIMITS);
        let stat = put(&pool, "f", 100_000).await.unwrap();
        let data = pool.read(&path("f"), &stat.version, 0..100_000).await.unwrap();
        assert_eq!(data.len(), 100_000);
    }
}

mod fault {
    use super::*;

    #[tokio::test]
    async fn a_pool_that_is_down_is_unavailable_and_changes_nothing() {
        let inner = memory();
        let pool = Fault::new(Arc::clone(&inner) as Arc<dyn Pool>, 1);
        pool.set_down(true);
        let error = put(&pool, "f", 1).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(inner.snapshot().is_empty());
        pool.set_down(false);
        put(&pool, "f", 1).await.unwrap();
        assert_eq!(inner.snapshot().len(), 1);
    }

    #[tokio::test]
    async fn a_failure_before_changes_nothing_and_one_after_loses_the_answer() {
        for (moment, objects) in [(FaultMoment::Before, 0), (FaultMoment::After, 1)] {
            let inner = memory();
            let pool = Fault::new(Arc::clone(&inner) as Arc<dyn Pool>, 1);
            pool.fail_call(1, moment);
            pool.mkdir(&path("d"), &attrs()).await.unwrap_err();
            assert_eq!(inner.snapshot().len(), objects, "{moment:?}");
            // No other call fails.
            pool.mkdir(&path("e"), &attrs()).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_crash_fails_all_later_calls_until_it_is_healed() {
        let inner = memory();
        let pool = Fault::new(Arc::clone(&inner) as Arc<dyn Pool>, 1);
        pool.mkdir(&path("a"), &attrs()).await.unwrap();
        pool.crash_at(2, FaultMoment::After);
        pool.mkdir(&path("b"), &attrs()).await.unwrap();
        pool.mkdir(&path("c"), &attrs()).await.unwrap_err();
        pool.mkdir(&path("d"), &attrs()).await.unwrap_err();
        let names: Vec<_> = inner.snapshot().into_keys().map(|path| path.to_string()).collect();
        assert_eq!(names, ["/a", "/b", "/c"]);
        pool.heal();
        pool.mkdir(&path("d"), &attrs()).await.unwrap();
        assert_eq!(pool.calls(), 5);
    }

    #[tokio::test]
    async fn a_put_may_fail_in_the_middle_of_its_content() {
        let inner = memory();
        let pool = Fault::new(Arc::clone(&inner) as Arc<dyn Pool>, 1);
        // The call itself, then its pieces.
        pool.fail_call(3, FaultMoment::Before);
        let content = pieces(&[(0, "one"), (3, "two"), (6, "three")]);
        pool.put(&path("f"), 11, content, &attrs(), &Expected::Absent).await.unwrap_err();
        assert!(inner.snapshot().is_empty());
    }

    #[tokio::test]
    async fn calls_with_parts_fail_before_or_after_they_take_effect() {
        let inner = memory();
        let pool = Fault::new(Arc::clone(&inner) as Arc<dyn Pool>, 1);
        let send = async || pool.send_part("a", 4_096, pieces(&[(0, "one"), (3, "two")])).await;
        // The call itself, then its pieces.
        for number in 1..=3 {
            pool.fail_call(number, FaultMoment::Before);
            send().await.unwrap_err();
            assert!(inner.parts().is_empty());
        }
        pool.fail_call(1, FaultMoment::After);
        send().await.unwrap_err();
        assert_eq!(inner.parts(), ["a"]);
        let part = send().await.unwrap();

        let put = async || {
            let end = Part::Here { len: 3, content: pieces(&[(0, "end")]) };
            let parts = vec![Part::Sent(part.clone()), end];
            pool.put_parts(&path("f"), parts, &attrs(), &Expected::Absent).await
        };
        let odds = |kind, before, after| pool.set_odds(kind, Odds { before, after });
        odds(CallKind::PutParts, 1.0, 0.0);
        put().await.unwrap_err();
        odds(CallKind::PutParts, 0.0, 0.0);
        odds(CallKind::PutPiece, 1.0, 0.0);
        put().await.unwrap_err();
        assert!(inner.snapshot().is_empty());
        pool.heal();
        odds(CallKind::PutParts, 0.0, 1.0);
        put().await.unwrap_err();
        let content = &inner.snapshot()[&path("f")].content;
        assert_eq!((&content[..7], &content[4_096..]), (&b"onetwo\0"[..], &b"end"[..]));

        odds(CallKind::ReadPart, 1.0, 0.0);
        pool.read_part(&part, 0..6).await.unwrap_err();
        odds(CallKind::RemovePart, 0.0, 1.0);
        pool.remove_part("a").await.unwrap_err();
        assert!(inner.parts().is_empty());
    }

    async fn failures(seed: u64, odds: Odds) -> Vec<bool> {
        let pool = Fault::new(memory(), seed);
        pool.set_odds(CallKind::Stat, odds);
        let mut failed = Vec::new();
        for _ in 0..400 {
            failed.push(pool.stat(&PoolPath::root()).await.is_err());
            // Calls of another kind still work.
            pool.space().await.unwrap();
        }
        failed
    }

    #[tokio::test]
    async fn chance_failures_follow_the_seed_and_the_odds() {
        let odds = Odds { before: 0.2, after: 0.2 };
        let first = failures(7, odds).await;
        assert_eq!(first, failures(7, odds).await);
        assert_ne!(first, failures(8, odds).await);
        let count = first.iter().filter(|failed| **failed).count();
        assert!((100..=220).contains(&count), "{count} of 400 failed at odds of 0.4");
        assert_eq!(failures(7, Odds::default()).await, [false; 400]);
        assert_eq!(failures(7, Odds { before: 1.0, after: 0.0 }).await, [true; 400]);
    }

    #[tokio::test(start_paused = true)]
    async fn calls_hang_until_they_are_released() {
        let pool = Arc::new(Fault::new(memory(), 1));
        pool.set_hanging(true);
        let waiting = tokio::spawn({
            let pool = Arc::clone(&pool);
            async move { pool.stat(&PoolPath::root()).await }
        });
        tokio::time::sleep(Duration::from_secs(3_600)).await;
        assert!(!waiting.is_finished());
        pool.set_hanging(false);
        waiting.await.unwrap().unwrap();
    }
}

mod metrics {
    use super::*;

    #[tokio::test]
    async fn calls_errors_and_bytes_are_counted() {
        let pool = Metrics::new(memory());
        let stat = put(&pool, "f", 1_000).await.unwrap();
        pool.read(&path("f"), &stat.version, 900..2_000).await.unwrap();
        pool.write_at(&path("f"), 0, Bytes::from_static(b"abc")).await.unwrap();
        pool.stat(&path("none")).await.unwrap_err();
        pool.list(&PoolPath::root()).await.unwrap().try_collect::<Vec<_>>().await.unwrap();
        let snapshot = pool.snapshot();
        assert_eq!((snapshot.bytes_read(), snapshot.bytes_written(), snapshot.errors()), (100, 1_003, 1));
        assert_eq!(snapshot.of(CallKind::Stat).errors, 1);
        assert_eq!(snapshot.of(CallKind::Put).count, 1);
        assert_eq!(snapshot.of(CallKind::Mkdir).count, 0);
        assert_eq!(snapshot.in_flight, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_and_abandoned_calls_and_latency_are_counted() {
        let slow = Arc::new(Throttle::new(memory(), None, Duration::from_millis(7)));
        let pool = Metrics::new(slow);
        {
            let root = PoolPath::root();
            let mut call = pool.stat(&root);
            assert!(futures::poll!(&mut call).is_pending());
            assert_eq!(pool.in_flight(), 1);
        }
        pool.stat(&PoolPath::root()).await.unwrap();
        let stats = pool.snapshot().of(CallKind::Stat);
        assert_eq!((stats.count, stats.abandoned, pool.in_flight()), (1, 1, 0));
        assert_eq!((stats.total_latency_us, stats.max_latency_us), (7_000, 7_000));
    }

    #[tokio::test]
    async fn what_parts_send_is_counted_with_their_calls() {
        let pool = Metrics::new(memory());
        let part = pool.send_part("a", 4_096, pieces(&[(0, "one"), (3, "two")])).await.unwrap();
        pool.read_part(&part, 2..10).await.unwrap();
        let end = Part::Here { len: 9, content: pieces(&[(0, "end")]) };
        pool.put_parts(&path("f"), vec![Part::Sent(part), end], &attrs(), &Expected::Absent).await.unwrap();
        pool.remove_part("a").await.unwrap();
        let snapshot = pool.snapshot();
        let of = |kind| {
            let stats = snapshot.of(kind);
            (stats.count, stats.bytes_read, stats.bytes_written)
        };
        assert_eq!((of(CallKind::SendPart), of(CallKind::ReadPart)), ((1, 0, 6), (1, 8, 0)));
        assert_eq!((of(CallKind::PutParts), of(CallKind::RemovePart)), ((1, 0, 3), (1, 0, 0)));
        assert_eq!(of(CallKind::Put), (0, 0, 0));
    }

    #[tokio::test]
    async fn the_snapshot_is_json_by_the_names_of_calls() {
        let pool = Metrics::new(memory());
        pool.sync_dir(&PoolPath::root()).await.unwrap();
        let json = serde_json::to_value(pool.snapshot()).unwrap();
        assert_eq!(json["calls"]["sync_dir"]["count"], 1);
        for kind in CallKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
    }
}
