//! JSON objects whose keys keep their order.

use serde::{Serialize, Serializer};
use serde_json::Value;

/// A JSON object.
#[derive(Clone, Debug, Default)]
pub(crate) struct Object(Vec<(&'static str, ObjectValue)>);

#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
enum ObjectValue {
    Value(Value),
    Object(Object),
    Objects(Vec<Object>),
}

impl Object {
    fn with(mut self, key: &'static str, value: ObjectValue) -> Self {
        self.0.push((key, value));
        self
    }

    /// Adds a key.
    pub(crate) fn key(self, key: &'static str, value: impl Serialize) -> Self {
        // Serializing numbers, texts and structs of them cannot fail.
        let value = serde_json::to_value(value).unwrap_or_default();
        self.with(key, ObjectValue::Value(value))
    }

    /// Adds a key if it has a value.
    pub(crate) fn optional(self, key: &'static str, value: Option<impl Serialize>) -> Self {
        match value {
            Some(value) => self.key(key, value),
            None => self,
        }
    }

    /// Adds a key with an object.
    pub(crate) fn object(self, key: &'static str, object: Object) -> Self {
        self.with(key, ObjectValue::Object(object))
    }

    /// Adds a key with a list of objects.
    pub(crate) fn objects(
        self,
        key: &'static str,
        objects: impl IntoIterator<Item = Object>,
    ) -> Self {
        self.with(key, ObjectValue::Objects(objects.into_iter().collect()))
    }
}

impl Serialize for Object {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        // serde_json's own map would sort the keys.
        to.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_keep_their_order_at_every_depth() {
        let inner = || Object::default().key("z", 1).key("a", "text");
        let object = Object::default()
            .objects("rows", [inner(), inner()])
            .optional("absent", None::<u8>)
            .key("none", None::<u8>)
            .object("inner", inner());
        assert_eq!(
            serde_json::to_string(&object).unwrap(),
            r#"{"rows":[{"z":1,"a":"text"},{"z":1,"a":"text"}],"none":null,"inner":{"z":1,"a":"text"}}"#
        );
    }
}
