//! Items of records whose layout has a version, and which read the older ones too.

use serde::de::{Error, SeqAccess};

/// The version of the items that this build writes.
pub(super) const VERSION: u32 = 3;

/// Fails for versions that this build does not read.
pub(super) fn check_version<E: Error>(version: u32) -> Result<(), E> {
    match version {
        1..=VERSION => Ok(()),
        _ => Err(E::custom(format!(
            "adamw: the optimizer record has version {version}, this build reads versions 1 to {VERSION}; load it with \
             the build that wrote it"
        ))),
    }
}

/// The next field of an item in a format that does not name its fields.
pub(super) fn field<'de, T, A>(fields: &mut A, name: &'static str) -> Result<T, A::Error>
where
    T: serde::Deserialize<'de>,
    A: SeqAccess<'de>,
{
    fields
        .next_element()?
        .ok_or_else(|| Error::missing_field(name))
}

/// Defines a serialized item, from the fields of version 1 and those that later versions added.
///
/// In an item of an older version the added fields have their type's default. A format that names no fields, such as
/// bincode, holds nothing in their place.
macro_rules! versioned_item {
    (
        $(#[$attribute:meta])*
        $item:ident {
            $($(#[$old_attribute:meta])* $old:ident: $old_type:ty,)*
        }
        $(since $since:literal {
            $($(#[$new_attribute:meta])* $new:ident: $new_type:ty,)*
        })*
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, serde::Serialize)]
        pub struct $item {
            version: u32,
            $($(#[$old_attribute])* $old: $old_type,)*
            $($($(#[$new_attribute])* $new: $new_type,)*)*
        }

        impl<'de> serde::Deserialize<'de> for $item {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                use serde::{Deserialize, de::{MapAccess, SeqAccess, Visitor, value::MapAccessDeserializer}};
                use $crate::optim::versioned::{check_version, field};

                #[derive(serde::Deserialize)]
                struct Named {
                    version: u32,
                    $($old: $old_type,)*
                    $($(#[serde(default)] $new: $new_type,)*)*
                }

                struct Fields;

                impl<'de> Visitor<'de> for Fields {
                    type Value = $item;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str(concat!("struct ", stringify!($item)))
                    }

                    fn visit_seq<A: SeqAccess<'de>>(self, mut fields: A) -> Result<$item, A::Error> {
                        let version = field(&mut fields, "version")?;
                        check_version(version)?;
                        Ok($item {
                            version,
                            $($old: field(&mut fields, stringify!($old))?,)*
                            $($($new: match version < $since {
                                true => Default::default(),
                                false => field(&mut fields, stringify!($new))?,
                            },)*)*
                        })
                    }

                    fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<$item, A::Error> {
                        let named = Named::deserialize(MapAccessDeserializer::new(fields))?;
                        check_version(named.version)?;
                        Ok($item {
                            version: named.version,
                            $($old: named.$old,)*
                            $($($new: named.$new,)*)*
                        })
                    }
                }

                let names = &["version", $(stringify!($old),)* $($(stringify!($new),)*)*];
                deserializer.deserialize_struct(stringify!($item), names, Fields)
            }
        }
    };
}

pub(super) use versioned_item;
