//! A random graph with the skew of real ones, and breadth-first search in it.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::Path;

use gms_tests::{Dice, mix};

use crate::error::{BenchError, Trying};

/// Of a node without a parent.
pub(crate) const NONE: u32 = u32::MAX;
/// Quadrants of a Kronecker graph, cumulated, of 2^16: those of Graph 500 (0.57, 0.19, 0.19).
const QUADRANTS: [u64; 3] = [37_356, 49_807, 62_259];
/// When to search from the unvisited, and when from the visited again (Beamer, Asanovic, Patterson 2012; values of GAPBS).
const ALPHA: usize = 15;
const BETA: usize = 18;
/// Bytes read at once.
const CHUNK: usize = 1 << 16;
/// Nodes of a graph that is read, as a power of two.
const SCALE_MAX: u32 = 26;

/// An undirected graph as compressed sparse rows.
pub(crate) struct Graph {
    /// Where the neighbours of each node begin; one more entry at the end.
    offsets: Vec<u32>,
    neighbours: Vec<u32>,
}

impl Graph {
    /// A Kronecker graph of 2^`scale` nodes and `edges` edges, its nodes shuffled; always the same.
    pub(crate) fn kronecker(scale: u32, edges: usize) -> Graph {
        let ends = || {
            (0..edges).flat_map(|number| {
                let (from, to) = edge(scale, number);
                [(from, to), (to, from)]
            })
        };
        let mut offsets = vec![0u32; (1 << scale) + 1];
        ends().for_each(|(from, _)| offsets[from + 1] += 1);
        (1..offsets.len()).for_each(|node| offsets[node] += offsets[node - 1]);
        let mut next = offsets.clone();
        let mut neighbours = vec![0u32; 2 * edges];
        for (from, to) in ends() {
            neighbours[next[from] as usize] = to as u32;
            next[from] += 1;
        }
        Graph { offsets, neighbours }
    }

    /// Number of nodes.
    pub(crate) fn nodes(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Those of `node`.
    fn neighbours(&self, node: usize) -> &[u32] {
        &self.neighbours[self.offsets[node] as usize..self.offsets[node + 1] as usize]
    }

    fn degree(&self, node: usize) -> usize {
        self.neighbours(node).len()
    }

    /// A random node that has neighbours.
    pub(crate) fn source(&self, dice: &mut Dice) -> usize {
        loop {
            let node = dice.place(self.nodes());
            if self.degree(node) > 0 {
                return node;
            }
        }
    }

    /// Writes it to a file.
    pub(crate) fn write(&self, path: &Path) -> Result<(), BenchError> {
        let what = path.display().to_string();
        let mut file = BufWriter::new(File::create(path).trying(&what)?);
        let head = [self.offsets.len() as u32, self.neighbours.len() as u32];
        for numbers in [&head, &self.offsets[..], &self.neighbours] {
            let mut numbers = numbers.iter();
            numbers.try_for_each(|n| file.write_all(&n.to_le_bytes())).trying(&what)?;
        }
        file.flush().trying(&what)
    }

    /// Reads what [`Graph::write`] wrote.
    pub(crate) fn read(path: &Path) -> Result<Graph, BenchError> {
        let what = path.display().to_string();
        let mut file = BufReader::with_capacity(CHUNK, File::open(path).trying(&what)?);
        let head = numbers(&mut file, 2).trying(&what)?;
        let (offsets, neighbours) = (head[0] as usize, head[1] as usize);
        if !(2..=(1 << SCALE_MAX) + 1).contains(&offsets) {
            return Err(BenchError::Invalid(format!("{what} is no graph")));
        }
        let graph = Graph {
            offsets: numbers(&mut file, offsets).trying(&what)?,
            neighbours: numbers(&mut file, neighbours).trying(&what)?,
        };
        let last = graph.offsets[offsets - 1] as usize;
        match graph.offsets.is_sorted() && last == neighbours {
            true => Ok(graph),
            false => Err(BenchError::Invalid(format!("{what} is no graph"))),
        }
    }

    /// A parent of each node in a search from `source`, which is its own; [`NONE`] of those which it does not reach.
    pub(crate) fn search(&self, source: usize) -> Vec<u32> {
        let mut parents = vec![NONE; self.nodes()];
        parents[source] = source as u32;
        let mut front = vec![source as u32];
        let (mut unexplored, mut scouts) = (self.neighbours.len(), self.degree(source));
        while !front.is_empty() {
            if scouts > unexplored / ALPHA {
                front = self.upwards(front, &mut parents);
                scouts = 1;
            } else {
                unexplored = unexplored.saturating_sub(scouts);
                (front, scouts) = self.downwards(&front, &mut parents);
            }
        }
        parents
    }

    /// One step from the visited: the nodes found, and how many neighbours they have.
    fn downwards(&self, front: &[u32], parents: &mut [u32]) -> (Vec<u32>, usize) {
        let (mut next, mut scouts) = (Vec::new(), 0);
        for &from in front {
            for &to in self.neighbours(from as usize) {
                if parents[to as usize] == NONE {
                    parents[to as usize] = from;
                    scouts += self.degree(to as usize);
                    next.push(to);
                }
            }
        }
        (next, scouts)
    }

    /// Steps from the unvisited, until they find few nodes: these.
    fn upwards(&self, front: Vec<u32>, parents: &mut [u32]) -> Vec<u32> {
        let nodes = self.nodes();
        let (mut front, mut awake) = (Bits::of(nodes, &front), front.len());
        loop {
            let mut next = Bits::of(nodes, &[]);
            let before = std::mem::replace(&mut awake, 0);
            for (node, parent) in parents.iter_mut().enumerate() {
                if *parent == NONE
                    && let Some(&from) = self.neighbours(node).iter().find(|&&n| front.has(n))
                {
                    *parent = from;
                    next.set(node as u32);
                    awake += 1;
                }
            }
            if awake < before && awake <= nodes / BETA {
                return (0..nodes as u32).filter(|&node| next.has(node)).collect();
            }
            front = next;
        }
    }
}

/// A set of nodes.
struct Bits(Vec<u64>);

impl Bits {
    fn of(nodes: usize, set: &[u32]) -> Bits {
        let mut bits = Bits(vec![0; nodes.div_ceil(64)]);
        set.iter().for_each(|&node| bits.set(node));
        bits
    }

    fn set(&mut self, node: u32) {
        self.0[node as usize / 64] |= 1 << (node % 64);
    }

    fn has(&self, node: u32) -> bool {
        self.0[node as usize / 64] >> (node % 64) & 1 != 0
    }
}

/// The ends of edge `number`: of each level of the matrix a quadrant by chance (Graph 500).
fn edge(scale: u32, number: usize) -> (usize, usize) {
    let mut dice = Dice::of_thread(number as u64, 0);
    let (mut from, mut to, mut chance) = (0, 0, 0);
    for level in 0..scale {
        if level % 4 == 0 {
            chance = dice.bits();
        }
        let quadrant = QUADRANTS.iter().filter(|&&end| chance & 0xffff >= end).count();
        chance >>= 16;
        from = from << 1 | quadrant >> 1;
        to = to << 1 | quadrant & 1;
    }
    (shuffled(scale, from), shuffled(scale, to))
}

/// A permutation of the nodes, so that a node's number does not tell how many neighbours it has: each step can be taken back.
fn shuffled(scale: u32, node: usize) -> usize {
    let mask = (1usize << scale) - 1;
    let mut node = node;
    for round in 1..=3 {
        node = node.wrapping_mul(mix(round) as usize | 1) & mask;
        node ^= node >> (scale / 2).max(1);
    }
    node
}

fn numbers(file: &mut impl Read, count: usize) -> std::io::Result<Vec<u32>> {
    let mut numbers = Vec::with_capacity(count);
    let mut bytes = vec![0; CHUNK];
    while numbers.len() < count {
        let part = CHUNK.min((count - numbers.len()) * size_of::<u32>());
        file.read_exact(&mut bytes[..part])?;
        let (words, _) = bytes[..part].as_chunks();
        numbers.extend(words.iter().map(|&word| u32::from_le_bytes(word)));
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::scratch::Scratch;

    /// Depth of each node, by the simplest search.
    fn depths(graph: &Graph, source: usize) -> Vec<Option<u32>> {
        let mut depths = vec![None; graph.nodes()];
        depths[source] = Some(0);
        let mut queue = VecDeque::from([source]);
        while let Some(from) = queue.pop_front() {
            for &to in graph.neighbours(from) {
                if depths[to as usize].is_none() {
                    depths[to as usize] = depths[from].map(|depth| depth + 1);
                    queue.push_back(to as usize);
                }
            }
        }
        depths
    }

    #[test]
    fn searches_find_shortest_ways() {
        for (scale, edges) in [(3, 4), (10, 700), (10, 3_000), (12, 64_000)] {
            let graph = Graph::kronecker(scale, edges);
            let mut dice = Dice::of_thread(1, 0);
            for _ in 0..5 {
                let source = graph.source(&mut dice);
                let (parents, depths) = (graph.search(source), depths(&graph, source));
                for node in 0..graph.nodes() {
                    let parent = parents[node];
                    assert_eq!(parent == NONE, depths[node].is_none(), "node {node}");
                    if parent != NONE && node != source {
                        assert_eq!(depths[parent as usize].map(|d| d + 1), depths[node]);
                        assert!(graph.neighbours(node).contains(&parent));
                    }
                }
            }
        }
    }

    #[test]
    fn graphs_are_skewed_and_survive_a_file() {
        let graph = Graph::kronecker(12, 64_000);
        let greatest = (0..graph.nodes()).map(|node| graph.degree(node)).max();
        assert!(greatest > Some(50 * 2 * 64_000 / graph.nodes() / 4), "{greatest:?}");
        let mut all: Vec<usize> = (0..1 << 12).map(|node| shuffled(12, node)).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 1 << 12, "shuffling keeps nodes apart");
        let scratch = Scratch::new().expect("a directory");
        let path = scratch.path("graph");
        graph.write(&path).expect("a file");
        let again = Graph::read(&path).expect("the graph");
        assert!(again.offsets == graph.offsets && again.neighbours == graph.neighbours);
        std::fs::write(&path, [9; 64]).expect("another file");
        assert!(Graph::read(&path).is_err());
    }
}
