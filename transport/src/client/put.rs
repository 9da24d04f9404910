//! One put: up to 64 pages for one agent, in one request. It is not repeated: whoever put the pages places them anew,
//! perhaps elsewhere.

use crate::message::{Control, PagesReply, Status};

/// See the module's documentation. Sets of pages are masks: bit i is page i.
#[derive(Debug)]
pub(super) struct Put {
    /// Pages that the agent has stored, by its reply; none before that.
    pub stored: u64,
}

impl Put {
    pub(super) fn handle_reply(&mut self, control: &Control) {
        if matches!(control.status(), Status::Ok | Status::Full | Status::Draining) {
            self.stored = control.answer::<PagesReply>().done;
        }
    }
}
