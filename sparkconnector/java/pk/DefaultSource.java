// The class that Spark finds for format("pk") before it looks for Python data sources.
//
// Spark's look-up of the name "pk" first tries to load the class `pk`, then `pk.DefaultSource`, and
// asks Python only if both are missing.  This class is Spark's own Python data source; it replaces
// nothing but the scan builder.  The inherited code finds, plans, reads and writes through Python.
//
// Local invariant
//   F1  With the switch off (`columnar`, PK_SPARK_COLUMNAR), or when executors may lack the jar, Spark
//       gets its own scan builder, and no other class of this jar takes part in the query.
package pk;

import java.util.Map;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2;
import org.apache.spark.sql.execution.datasources.v2.python.PythonTable;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import pk.reader.ColumnarScanBuilder;
import pk.reader.Switch;

/** Spark's Python data source "pk" with a scan builder that can read columns in the JVM. */
public final class DefaultSource extends PythonDataSourceV2 {
  private String name = "pk";

  @Override
  public void setShortName(String shortName) {
    // Spark passes the word that the query gave, which is also the name of the Python source.
    name = shortName;
    super.setShortName(shortName);
  }

  @Override
  public StructType inferSchema(CaseInsensitiveStringMap options) {
    // Spark keeps the Python source that it creates here, with its options.
    return super.inferSchema(Switch.isOn(options) ? Switch.stated(options) : options);
  }

  @Override
  public Table getTable(
      StructType schema, Transform[] partitioning, Map<String, String> properties) {
    // The inherited method refuses what it cannot do; its table is replaced by one of the same kind.
    super.getTable(schema, partitioning, properties);
    return new ColumnarTable(this, name, schema);
  }

  private static final class ColumnarTable extends PythonTable {
    private final PythonDataSourceV2 source;
    private final String name;
    private final StructType full;

    ColumnarTable(PythonDataSourceV2 source, String name, StructType full) {
      super(source, name, full);
      this.source = source;
      this.name = name;
      this.full = full;
    }

    @Override
    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
      if (!Switch.isOn(options)) {
        return super.newScanBuilder(options); // F1
      }
      return new ColumnarScanBuilder(source, name, full, Switch.stated(options));
    }
  }
}
