//! The front door.
pub struct Communicator; pub struct Config;
