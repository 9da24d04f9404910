//! Breadth-first searches in a graph that is read from a file. As in GAPBS, reading it does not count.

use std::path::PathBuf;
use std::time::Instant;

use gms_tests::Dice;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::error::BenchError;
use crate::graph::Graph;

/// What to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    /// The graph's file.
    pub graph: PathBuf,
    /// Searches, each from a node chosen at random.
    pub searches: u32,
}

/// What was found.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Found {
    /// For all searches.
    pub seconds: f64,
    /// Of the parents of all nodes in all searches.
    pub digest: u64,
}

/// Does it.
pub(crate) fn run(orders: &Orders) -> Result<Found, BenchError> {
    let graph = Graph::read(&orders.graph)?;
    let (mut dice, mut digest) = (Dice::of_thread(1, 0), Xxh3::new());
    let start = Instant::now();
    for _ in 0..orders.searches {
        let parents = graph.search(graph.source(&mut dice));
        parents.iter().for_each(|parent| digest.update(&parent.to_le_bytes()));
    }
    Ok(Found { seconds: start.elapsed().as_secs_f64(), digest: digest.digest() })
}
