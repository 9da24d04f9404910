//! The policies of gms as pure code: a view in, a decision out. No I/O, no clock, no randomness of their own:
//! `now` and random numbers are arguments.
//!
//! | question | module | source |
//! |---|---|---|
//! | which page goes out | [`eviction`] | generalized CLOCK (Smith 1978), refault distances as the reference signal |
//! | to which agent | [`placement`] | power of two choices (Mitzenmacher 1996), GMS weights |
//! | which agents are far apart | [`spread`] | failure domains |
//! | how is it noted who has it | [`redundancy`] | sets of agents, numbered |
//! | how pages outlive agents at less than a copy each | [`stripes`] | Carbink (OSDI'22) |
//! | when is another agent asked too | [`hedge`] | hedged requests (Dean and Barroso 2013) |
//! | which pages come in early | [`prefetch`] | Leap (Al Maruf and Chowdhury, ATC'20) |
//! | when to act at all | [`budget`] | watermarks |
//! | what if no agent takes pages | [`full`] | the user |
//! | how much does an agent export | [`export`] | what its host can spare |
//! | how many pages beyond that does it ask to be taken away | [`recall`] | a window of a second, as measured |
//!
//! Besides, [`size`] reads sizes as people write them, the same in every command.
#![forbid(unsafe_code)]

pub mod agents;
pub mod budget;
pub mod eviction;
pub mod export;
pub mod full;
pub mod hedge;
pub mod ids;
pub mod limits;
pub mod pace;
pub mod placement;
pub mod prefetch;
pub mod recall;
pub mod redundancy;
pub mod shape;
pub mod size;
pub mod spread;
pub mod stripes;

pub use budget::{Budget, Decision};
pub use eviction::{Clock, Mark};
pub use export::{Export, ExportLaw, ExportRange, HostVerdict, HostView};
pub use full::{FullAction, WhenFull};
pub use hedge::Hedge;
pub use ids::{AgentId, Bytes, ContentId, PageAddr, PageCount, SpaceId};
pub use placement::{AgentView, Feedback, Placement, Reply, TwoChoices, choose_set, nearest};
pub use prefetch::{Streams, Window};
pub use recall::Recall;
pub use redundancy::{AgentSet, PlacementId, Placements, Redundancy, Shortage};
pub use size::{Size, SizeError};
pub use spread::{Site, Sites, Spread};
pub use stripes::{Codec, Stripes};
