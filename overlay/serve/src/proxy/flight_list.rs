//! The flights under way, and which of them further clients may join.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use super::flight::Flight;
use super::store::ResponsePlace;

/// Flights at the same time. Further requests are forwarded for one client each, and their responses are not kept.
const FLIGHTS_MAX: usize = 4096;

#[derive(Default)]
pub struct FlightList {
    /// All of them: the response of each may be kept.
    all: Vec<Arc<Flight>>,
    /// Those that clients may join, by the places of their responses.
    joined: HashMap<ResponsePlace, Arc<Flight>>,
}

/// What a request to begin a flight brought.
pub enum FlightStart {
    Begun(Arc<Flight>),
    /// Another client has begun one, which may be joined.
    Joined(Arc<Flight>),
    TooMany,
}

impl FlightList {
    pub fn at(&self, place: &ResponsePlace) -> Option<Arc<Flight>> {
        self.joined.get(place).cloned()
    }

    /// Begins a flight. `is_joined`: further clients may join it.
    pub fn begin(&mut self, place: ResponsePlace, target: &str, is_joined: bool) -> FlightStart {
        if self.all.len() >= FLIGHTS_MAX {
            return FlightStart::TooMany;
        }
        let flight = Flight::new(target);
        if is_joined {
            match self.joined.entry(place) {
                Entry::Occupied(begun) => return FlightStart::Joined(begun.get().clone()),
                Entry::Vacant(free) => _ = free.insert(flight.clone()),
            }
        }
        self.all.push(flight.clone());
        FlightStart::Begun(flight)
    }

    /// The response of a flight will be at another place, too. An outdated flight stays one that no client joins.
    pub fn also_at(&mut self, place: &ResponsePlace, flight: &Arc<Flight>) {
        if !flight.is_outdated() {
            self.joined.entry(place.clone()).or_insert_with(|| flight.clone());
        }
    }

    /// From now on, no client joins these flights, and their responses are not kept.
    pub fn outdate(&mut self, is_one: impl Fn(&Flight) -> bool) {
        self.all.iter().filter(|flight| is_one(flight)).for_each(|flight| flight.outdate());
        self.joined.retain(|_, flight| !flight.is_outdated());
    }

    pub fn end(&mut self, flight: &Arc<Flight>) {
        self.all.retain(|one| !Arc::ptr_eq(one, flight));
        self.joined.retain(|_, one| !Arc::ptr_eq(one, flight));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun(list: &mut FlightList, target: &str, is_joined: bool) -> Arc<Flight> {
        match list.begin(ResponsePlace::of(target), target, is_joined) {
            FlightStart::Begun(flight) => flight,
            FlightStart::Joined(_) | FlightStart::TooMany => panic!("{target} did not begin"),
        }
    }

    #[test]
    fn an_outdated_flight_is_joined_at_no_place() {
        let mut list = FlightList::default();
        let (place, variant) = (ResponsePlace::of("/a"), ResponsePlace::of_variant("/a", 1, &[]));
        let (first, alone, other) =
            (begun(&mut list, "/a", true), begun(&mut list, "/a", false), begun(&mut list, "/b", true));
        assert!(matches!(list.begin(place.clone(), "/a", true), FlightStart::Joined(at) if Arc::ptr_eq(&at, &first)));
        list.also_at(&variant, &first);
        assert!(list.at(&variant).is_some());
        list.outdate(|flight| flight.is_of("/a"));
        assert!(first.is_outdated() && alone.is_outdated() && !other.is_outdated());
        list.also_at(&variant, &first);
        assert!(list.at(&place).is_none() && list.at(&variant).is_none());
        let next = begun(&mut list, "/a", true);
        list.end(&first);
        assert!(list.at(&place).is_some_and(|at| Arc::ptr_eq(&at, &next)));
    }

    #[test]
    fn flights_that_no_client_may_join_count_among_the_others() {
        let mut list = FlightList::default();
        let first = begun(&mut list, "/0", false);
        (1..FLIGHTS_MAX).for_each(|at| _ = begun(&mut list, &format!("/{at}"), at % 2 == 0));
        assert!(matches!(list.begin(ResponsePlace::of("/x"), "/x", false), FlightStart::TooMany));
        list.outdate(|_| true);
        assert!(matches!(list.begin(ResponsePlace::of("/x"), "/x", true), FlightStart::TooMany));
        list.end(&first);
        begun(&mut list, "/x", true);
    }
}
